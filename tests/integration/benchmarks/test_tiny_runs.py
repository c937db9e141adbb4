"""The benchmarks that start servers keep working."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from testkit.benchmarks import run_benchmark

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


@pytest.mark.campaign
def test_durability_benchmark_answers_both_questions(tmp_path: Path) -> None:
    found, output, page = run_benchmark("durability", tmp_path)

    fsync, everysec = found["fsync"], found["everysec"]
    assert "points" in output
    assert "one connection, one by one" in output
    assert fsync["naive_per_s"] > 0
    assert fsync["ratio"] == pytest.approx(fsync["turns_per_s"] / fsync["naive_per_s"])
    assert everysec["stored"]["publisher"] == everysec["stored"]["bare"]
    assert math.isfinite(everysec["bare"])
    assert everysec["bare"] < 1
    assert "| difference, points |" in page


def test_stall_benchmark_measures_the_batch_assembled_on_the_loop(tmp_path: Path) -> None:
    (found,), output, page = run_benchmark("stall", tmp_path)

    assert "longest stall" in output
    assert found["num_bytes"] > 0
    assert min(found["idle_ms"], found["batcher_ms"], found["on_loop_ms"]) > 0
    assert "| on loop |" in page


@pytest.mark.campaign
def test_failover_benchmark_measures_a_frozen_replica(tmp_path: Path) -> None:
    found, output, page = run_benchmark("failover", tmp_path)

    assert "median s" in output
    assert (found["trials"], found["num_at_limit"]) == (1, 0)
    assert 0 < found["min_s"] == found["max_s"]
    assert "Goal: at most 10 s: reached." in page


@pytest.mark.campaign
def test_release_benchmark_measures_without_and_with_a_budget(tmp_path: Path) -> None:
    (without, limited), _, page = run_benchmark("release", tmp_path)

    assert (without["max_bytes"], limited["max_bytes"]) == (0, 200_000_000)
    assert without["per_s"] > 0
    assert without["samples"][-1]["lag"] == 0
    assert "Throughput with the budget over without: " in page


@pytest.mark.campaign
def test_idle_benchmark_measures_idle_and_closed_runs(tmp_path: Path) -> None:
    options = ("--runs", "2", "--settle", "0.5", "--window", "0.5")

    costs, _, page = run_benchmark("idle", tmp_path, *options)

    kinds = [(each["kind"], each["num_runs"]) for each in costs]
    assert kinds == [("none", 0), ("idle", 2), ("closed", 2)]
    assert "| 2 closed |" in page


@pytest.mark.campaign
def test_ingest_benchmark_measures_every_way_into_the_store(tmp_path: Path) -> None:
    found, output, page = run_benchmark("ingest", tmp_path)

    totals = {way: each["median_s"]["total"] for way, each in found["ways"].items()}
    limits = {way: each["limit_s"] for way, each in found["ways"].items()}
    assert found["trajectories"] == 16
    assert min(totals.values()) > 0
    assert limits["SDK over Redis"] is None
    assert limits["JSON, one group a request"] == pytest.approx(3.0 * 16 / 1024)
    assert limits["Arrow, 8 groups a request"] == pytest.approx(1.5 * 16 / 1024)
    assert "x Redis" in output
    assert all(f"| {way} |" in page for way in totals)


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_tinker_benchmark_divides_a_served_call(tmp_path: Path) -> None:
    found, output, page = run_benchmark("tinker_api", tmp_path)

    (model,) = found["models"].values()
    call = model["median_ms"]
    parts = ("submitted", "rows read", "passes", "the rest")
    assert sum(call[name] for name in parts) == pytest.approx(call["served"])
    assert min(call["direct"], *found["parts_ms"].values()) > 0
    assert found["load"]["num_samples"] == 4
    assert found["load"]["failures"] == []
    assert "| all answered |" in page
    assert "all of these" in output
