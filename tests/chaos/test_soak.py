"""Every kind of fault, one after the other in an order left to chance, over one running stack."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from harness.doomed import FAILPOINTS
from harness.report import MAX_STORE_BYTES
from harness.soak import MODES, play
from turnstream_server import failpoints

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

SEED = 20


def test_a_run_survives_random_faults(tmp_path: Path) -> None:
    reports = play(tmp_path, modes=MODES, seconds=25, every_s=0.5, seed=SEED)

    survivals = [survival for report in reports for survival in report.survivals.values()]
    num_injected = sum(survival.num_injected for survival in survivals)
    num_survived = sum(len(survival.recoveries_s) for survival in survivals)
    assert num_survived == num_injected > 5
    assert [report.durability for report in reports] == ["fsync", "everysec"]
    for report in reports:
        assert 0 < report.most_store_bytes < MAX_STORE_BYTES
        states = {"committed", "abandoned", "surplus", "incomplete", "evaluated"}
        assert report.counts.keys() <= {"accepted", *states}


def test_every_failpoint_of_the_product_is_drawn_by_one_fault() -> None:
    drawn = sorted(itertools.chain.from_iterable(FAILPOINTS.values()))

    assert drawn == sorted(failpoints.NAMES)
