"""Damaged stored bytes, requests and keys, over services and a store as processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.campaign import CHUNK, Campaign
from fuzz.services import ServiceCampaign

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.campaign]


def test_batcher_survives_damaged_runs_and_requests(tmp_path: Path) -> None:
    with Campaign(tmp_path, seed=20_261_123) as campaign:
        report = campaign.run(3 * CHUNK)

    assert report.problems == []
    assert report.num_cases >= 3 * CHUNK


def test_services_refuse_damaged_keys_and_bodies(tmp_path: Path) -> None:
    with ServiceCampaign(tmp_path, seed=20_261_126) as campaign:
        report = campaign.run(400)

    assert report.problems == []
    assert report.num_cases == 400
