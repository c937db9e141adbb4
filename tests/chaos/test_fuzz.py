"""Damaged stored bytes and requests, over a batcher and a store as processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz.campaign import CHUNK, Campaign
from fuzz.damage import Damage, damaged
from testkit import sealed
from turnstream.errors import UnknownFormatError
from turnstream.records.events import decode_event, encode_event

pytestmark = pytest.mark.timeout(240)


@pytest.mark.e2e
@pytest.mark.slow
def test_batcher_survives_damaged_runs_and_requests(tmp_path: Path) -> None:
    with Campaign(tmp_path, seed=20_261_123) as campaign:
        report = campaign.run(3 * CHUNK)

    assert report.problems == []
    assert report.num_cases >= 3 * CHUNK


def test_forged_damage_reaches_the_decoder() -> None:
    record = encode_event(sealed("g0"))

    forged = [damage for damage in map(_damage_of(record), range(300)) if damage.is_forged]
    plain = [damage for damage in map(_damage_of(record), range(300)) if not damage.is_forged]

    assert any(_is_read(damage.data) for damage in forged)
    assert any(_is_of_newer_release(damage.data) for damage in forged)
    assert not any(_is_read(damage.data) for damage in plain)


def _damage_of(record: bytes) -> Callable[[int], Damage]:
    return lambda seed: damaged(record, random.Random(seed))


def _is_read(record: bytes) -> bool:
    try:
        decode_event(record)
    except ValueError:
        return False
    return True


def _is_of_newer_release(record: bytes) -> bool:
    try:
        decode_event(record)
    except UnknownFormatError:
        return True
    except ValueError:
        return False
    return False
