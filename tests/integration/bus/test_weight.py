"""A finished trajectory costs at most 16 bytes; `benchmarks/ledger.py` weighs ten millions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.redis, pytest.mark.slow]

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "ledger.py"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("group_size", [8, 1])
def test_a_finished_trajectory_costs_at_most_sixteen_bytes(group_size: int) -> None:
    spec = importlib.util.spec_from_file_location("ledger_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = benchmark
    spec.loader.exec_module(benchmark)

    weight = benchmark.weigh(group_size=group_size, trajectories=200_000)

    assert weight.memory_usage <= benchmark.LIMIT_BYTES
