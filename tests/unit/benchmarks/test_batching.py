"""The benchmark of the batching core keeps working, and its loops do the job that it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from testkit.benchmarks import BENCHMARKS, run_benchmark


def test_tiny_run_measures_everything_and_shows_each_goal(tmp_path: Path) -> None:
    """Takes more than 5 s: the benchmark runs as a program."""
    found, output, page = run_benchmark("batching", tmp_path)

    assert "30 times the loop" in output
    with_goal = [line for line in found["lines"] if line["goal"] is not None]
    assert len(with_goal) == 5
    assert all(line["ours_ms"] > 0 for line in found["lines"])
    assert all(line["limit_ms"] > 0 for line in with_goal)
    assert {point["unit"]: list(point["ns_per_token"]) for point in found["growth"]} == {
        "turns": ["8", "16", "32", "64"],
        "rows": ["4", "8", "16", "32"],
    }
    assert "| merge short, breaks: none |" in page


def test_tiny_run_of_shares_measures_both_numbers_of_ranks(tmp_path: Path) -> None:
    found = run_benchmark("shares", tmp_path).results

    assert [line["num_ranks"] for line in found] == [8, 64]
    assert all(line["cut_ms"] > 0 for line in found)


@pytest.mark.campaign
def test_tiny_run_of_training_trains_equal_tokens_in_each_layout(tmp_path: Path) -> None:
    found, output, page = run_benchmark("training", tmp_path)

    step_wise, merged, packed = found["layouts"]
    trained = {each["num_trained_tokens"] for each in found["layouts"]}
    assert len(trained) == 1
    assert step_wise["num_rows"] == 2 * merged["num_rows"]
    assert merged["num_tokens"] == packed["num_tokens"] < step_wise["num_tokens"]
    assert packed["padding_share"] == 0 < merged["padding_share"]
    assert "merged packed" in output
    assert found["waiting"]["num_steps"] == 3
    assert 0 <= found["waiting"]["wait_s"] < found["waiting"]["elapsed_s"]
    assert "a worker waits" in output
    assert "A worker waited for data" in page
    assert "| merged packed |" in page


@pytest.mark.campaign
def test_tiny_run_of_cuda_trains_with_and_without_recomputation(tmp_path: Path) -> None:
    off, on = _measure_cuda(tmp_path, "--tiny")

    assert [off["recomputes"], on["recomputes"]] == [False, True]
    assert min(off["tokens_per_s"], on["tokens_per_s"]) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_half_a_billion_weights_train_in_bfloat16_with_a_known_mfu(tmp_path: Path) -> None:
    for each in _measure_cuda(tmp_path, "--rows", "2", "--updates", "2"):
        assert each["tokens_per_s"] > 0
        assert each["mfu"] is None or 0 < each["mfu"] < 1
        assert each["peak_gpu_bytes"] > 1e9


def _measure_cuda(folder: Path, *words: str) -> list[dict[str, Any]]:
    path = folder / "cuda.json"
    command = [sys.executable, BENCHMARKS / "cuda.py", *words, "--json", path]
    subprocess.run(command, check=True, timeout=600)
    return json.loads(path.read_text())


@pytest.mark.campaign
def test_tiny_run_of_sampling_measures_every_way(tmp_path: Path) -> None:
    found, output, page = run_benchmark("sampling", tmp_path)

    assert list(found["ways"]) == [
        "continuous", "one at a time", "generate", "padded batch", "no cache",
    ]  # fmt: skip
    assert min(found["ways"].values()) > 0
    assert "continuous is" in output
    assert "| padded batch |" in page
