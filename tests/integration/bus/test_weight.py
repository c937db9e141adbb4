"""Bytes of a finished trajectory; `benchmarks/ledger.py` measures ten millions."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.redis, pytest.mark.slow]

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("group_size", [8, 1])
def test_finished_trajectory_stays_within_its_limit_of_bytes(
    group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    benchmark = importlib.import_module("ledger")

    committed, untrained = benchmark.measure(group_size=group_size, trajectories=200_000)

    assert committed.memory_usage <= benchmark.LIMITS_BYTES[group_size]
    assert untrained.memory_usage <= benchmark.LIMITS_BYTES[group_size]
