"""Every kind of fault, one after the other in an order left to chance, over one running stack."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from harness.doomed import FAILPOINTS
from harness.report import MAX_STORE_BYTES
from harness.soak import MODES, Length, play
from turnstream_server import failpoints

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

SEED = 17803
"""Under fsync a run is paused, a batcher killed and the store; under everysec it is revised, forked
by one that dies, and the power is cut. That does not take long."""
NUM_FAULTS = 3


def test_a_run_survives_random_faults(tmp_path: Path) -> None:
    reports = play(tmp_path, modes=MODES, length=Length(num_faults=NUM_FAULTS), seed=SEED)

    survivals = [survival for report in reports for survival in report.survivals.values()]
    num_injected = sum(survival.num_injected for survival in survivals)
    num_survived = sum(len(survival.recoveries_s) for survival in survivals)
    num_in_vain = sum(survival.num_in_vain for survival in survivals)
    assert num_survived == num_injected
    assert num_injected + num_in_vain == NUM_FAULTS * len(MODES)
    assert [report.durability for report in reports] == ["fsync", "everysec"]
    for report in reports:
        assert 0 < report.most_store_bytes < MAX_STORE_BYTES
        states = {"committed", "abandoned", "surplus", "incomplete", "evaluated"}
        assert report.counts.keys() <= {"accepted", *states}


def test_every_failpoint_of_the_product_is_drawn_by_one_fault() -> None:
    drawn = sorted(itertools.chain.from_iterable(FAILPOINTS.values()))

    # Tests of the batcher kill at the others: test_rejections_are_final.py, test_parked_runs.py.
    elsewhere = {"reject.before", "reject.after", "park.before", "park.after"}
    assert drawn == sorted(failpoints.NAMES - elsewhere)
