"""The benchmarks that start servers keep working."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.redis

FOLDER = Path(__file__).parents[3] / "benchmarks"


def page_of(name: str, folder: Path, results: Path) -> str:
    page = folder / "page.md"
    page.write_text(f"<!-- figures: {name} -->\n<!-- end of figures -->\n")
    results.rename(folder / f"{name}.json")
    subprocess.run(
        [sys.executable, FOLDER / "page.py", "--results", folder, "--page", page], check=True
    )
    return page.read_text()


def test_the_durability_benchmark_answers_both_questions(tmp_path: Path) -> None:
    results = tmp_path / "results.json"

    done = subprocess.run(
        [sys.executable, FOLDER / "durability.py", "--tiny", "--json", results],
        capture_output=True,
        text=True,
        check=True,
    )

    found = json.loads(results.read_text())
    assert "points" in done.stdout
    assert "one connection, one by one" in done.stdout
    assert found["fsync"]["naive_per_s"] > 0
    assert found["fsync"]["ratio"] == pytest.approx(
        found["fsync"]["turns_per_s"] / found["fsync"]["naive_per_s"]
    )
    assert found["everysec"]["stored"]["publisher"] == found["everysec"]["stored"]["bare"]
    assert math.isfinite(found["everysec"]["bare"])
    assert found["everysec"]["bare"] < 1
    assert "| difference, points |" in page_of("durability", tmp_path, results)


@pytest.mark.grpc
def test_the_stall_benchmark_sees_the_batch_that_is_assembled_on_the_loop(tmp_path: Path) -> None:
    results = tmp_path / "results.json"

    done = subprocess.run(
        [sys.executable, FOLDER / "stall.py", "--tiny", "--json", results],
        capture_output=True,
        text=True,
        check=True,
    )

    (found,) = json.loads(results.read_text())
    assert "longest stall" in done.stdout
    assert found["num_bytes"] > 0
    assert min(found["idle_ms"], found["batcher_ms"], found["on_loop_ms"]) > 0
    assert "| on loop |" in page_of("stall", tmp_path, results)


@pytest.mark.grpc
def test_failover_benchmark_measures_a_frozen_replica(tmp_path: Path) -> None:
    results = tmp_path / "results.json"

    done = subprocess.run(
        [sys.executable, FOLDER / "failover.py", "--tiny", "--json", results],
        capture_output=True,
        text=True,
        check=True,
    )

    found = json.loads(results.read_text())
    assert "median s" in done.stdout
    assert (found["trials"], found["num_at_limit"]) == (1, 0)
    assert 0 < found["min_s"] == found["max_s"]
    assert "Goal: at most 10 s: reached." in page_of("failover", tmp_path, results)


@pytest.mark.grpc
def test_release_benchmark_measures_without_and_with_a_budget(tmp_path: Path) -> None:
    results = tmp_path / "results.json"

    subprocess.run(
        [sys.executable, FOLDER / "release.py", "--tiny", "--json", results],
        capture_output=True,
        check=True,
    )

    without, limited = json.loads(results.read_text())
    assert (without["max_bytes"], limited["max_bytes"]) == (0, 200_000_000)
    assert without["per_s"] > 0
    assert without["samples"][-1]["lag"] == 0
    assert "Throughput with the budget over without: " in page_of("release", tmp_path, results)


@pytest.mark.grpc
def test_idle_benchmark_measures_idle_and_closed_runs(tmp_path: Path) -> None:
    results = tmp_path / "results.json"

    subprocess.run(
        [
            *(sys.executable, FOLDER / "idle.py", "--json", results),
            *("--runs", "2", "--settle", "0.5", "--window", "0.5"),
        ],
        capture_output=True,
        check=True,
    )

    costs = json.loads(results.read_text())
    assert [(each["kind"], each["num_runs"]) for each in costs] == [
        *(("none", 0), ("idle", 2), ("closed", 2))
    ]
    assert "| 2 closed |" in page_of("idle", tmp_path, results)
