"""Opened groups that declare more samples than their run allows."""

from __future__ import annotations

import dataclasses
import tracemalloc

import pytest

from testkit import config
from turnstream.batching.fold.readiness import RunFold
from turnstream.errors import InvalidTurnError
from turnstream.records.events import decode_event, encode_event
from turnstream.types import GroupOpened, Purpose, TrajectoryAbandoned, TrajectoryKey

MOST_ON_WIRE = 2**32 - 1


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("num_samples", [1025, MOST_ON_WIRE])
def test_fold_refuses_groups_above_max_samples(purpose: Purpose, num_samples: int) -> None:
    # A raw event with 2^32 - 1 samples was taken in, and at the first sample that ended the list of
    # pending samples grew to 23 GB.
    fold = RunFold(config(2))
    opened = GroupOpened(group_id="g", prompt_uid="p", num_samples=num_samples, purpose=purpose)
    event = decode_event(encode_event(opened))
    tracemalloc.start()

    with pytest.raises(InvalidTurnError) as refused:
        fold.apply("1-0", event)
    fold.apply("2-0", TrajectoryAbandoned(key=TrajectoryKey("g", 0), reason="bored"))

    assert str(refused.value) == (
        f"num_samples: group 'g' has {num_samples} samples, above max_samples=1024 of the run"
    )
    assert list(fold.openings()) == []
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_fold_takes_groups_up_to_max_samples() -> None:
    fold = RunFold(config(2))

    fold.apply("1-0", GroupOpened(group_id="g", prompt_uid="p", num_samples=1024))

    assert list(fold.openings()) == [("g", "1-0")]


def test_fold_keeps_open_groups_above_a_lowered_limit() -> None:
    fold = RunFold(config(2))
    opened = GroupOpened(group_id="g", prompt_uid="p", num_samples=8)
    fold.apply("1-0", opened)

    fold.revise("2-0", dataclasses.replace(config(2), max_samples=4))
    fold.apply("1-0", opened)

    assert list(fold.openings()) == [("g", "1-0")]
