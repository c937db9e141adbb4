"""The benchmarks keep working: they measure, and fill their tables of the page."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from testkit.benchmarks import BENCHMARKS, run_benchmark

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

CAMPAIGN = pytest.mark.campaign
PIPELINE = ("--groups", "32", "--rounds", "1")
IDLE = ("--runs", "2", "--settle", "0.5", "--window", "0.5")


@pytest.mark.parametrize(
    ("name", "options", "printed", "row"),
    [
        ("batching", (), "30 times the loop", "| merge short, breaks: none |"),
        ("stall", (), "longest stall", "| on loop |"),
        ("shares", (), "", ""),
        *(
            pytest.param(*each, marks=CAMPAIGN)
            for each in (
                ("durability", (), "one connection, one by one", "| difference, points |"),
                ("failover", (), "median s", "Goal: at most 10 s: reached."),
                ("release", (), "", "Throughput with the budget over without: "),
                ("idle", IDLE, "", "| 2 closed |"),
                ("ingest", (), "x Redis", "| SDK over Redis |"),
                ("latency", (), "an empty round trip", "| seconds, median |"),
                ("peers", (), "x ours", "| TransferQueue, bulk |"),
                ("cold", (), "x floor", "| turnstream status |"),
                ("pipeline", PIPELINE, "agentic", "| 8 publishers |"),
                ("training", (), "a worker waits", "| merged packed |"),
                ("sampling", (), "continuous is", "| padded batch |"),
            )
        ),
        pytest.param(
            *("tinker_api", (), "all of these", "| all answered |"),
            marks=[CAMPAIGN, pytest.mark.timeout(600)],
        ),
    ],
)
def test_tiny_run_of_a_benchmark_measures_and_fills_its_page(
    name: str, options: tuple[str, ...], printed: str, row: str, tmp_path: Path
) -> None:
    """Takes more than 5 s: a benchmark runs as a program."""
    found, output, page = run_benchmark(name, tmp_path, *options)

    assert printed in output
    assert row in page
    numbers = [*_numbers(found)]
    assert any(numbers)
    assert all(map(math.isfinite, numbers))
    if name == "tinker_api":
        assert found["load"]["failures"] == []


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers of a result."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)


@CAMPAIGN
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
