"""Every kind of fault, one after the other in an order left to chance, over one running stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.soak import MAX_STORE_BYTES, soak

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

SEED = 20


def test_a_run_survives_random_faults(tmp_path: Path) -> None:
    report = soak(tmp_path, seconds=25, every_s=0.5, seed=SEED)

    num_injected = sum(survival.num_injected for survival in report.faults.values())
    num_survived = sum(len(survival.recoveries_s) for survival in report.faults.values())
    assert num_survived == num_injected > 5
    assert 0 < report.most_store_bytes < MAX_STORE_BYTES
    assert report.counts.keys() <= {"accepted", "committed", "abandoned", "surplus", "incomplete"}
