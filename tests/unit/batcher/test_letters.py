"""What a leader makes of an event that is not what it should be."""

from __future__ import annotations

import pytest

from turnstream.errors import RecordError
from turnstream.records.events import encode_event
from turnstream.records.framing import EVENT, write_frame
from turnstream.testing import sealed
from turnstream.types import RewardPosted, RunClosed, TrajectoryKey
from turnstream_server.batcher.letters import UnreadableEvent, read_entry
from turnstream_server.batcher.listener import EventEntry
from turnstream_server.batcher.payload import Damage

SEAL = sealed("g", sample=1)
KEY = TrajectoryKey("g", sample=1)
DAMAGED = encode_event(SEAL)[:-1] + b"x"
NEWER = write_frame(EVENT, b"")


def entry(record: bytes, posted_for: str = "") -> EventEntry:
    return EventEntry("1-0", record, posted_for)


@pytest.mark.parametrize("event", [SEAL, RewardPosted(key=KEY, reward=1.0)])
def test_what_was_posted_for_its_own_trajectory_is_an_event(event: object) -> None:
    record = encode_event(event)  # type: ignore[arg-type]  # one of the union

    assert read_entry(entry(record, "g/1/0")) == event


def test_a_damaged_seal_is_damage_of_the_trajectory_that_it_was_posted_for() -> None:
    found = read_entry(entry(DAMAGED, "g/1/0"))

    assert isinstance(found, Damage)
    assert found.key == KEY
    assert "checksum" in found.reason


def test_a_seal_that_names_another_trajectory_ends_neither() -> None:
    found = read_entry(entry(encode_event(SEAL), "g/2/0"))

    assert isinstance(found, Damage)
    assert found.key == TrajectoryKey("g", sample=2)
    assert "sample=1" in found.reason


def test_a_generator_cannot_close_the_run_with_a_seal() -> None:
    found = read_entry(entry(encode_event(RunClosed()), "g/1/0"))

    assert found == Damage(KEY, "what was posted for it is a RunClosed")


def test_a_damaged_event_of_nobody_is_kept_as_it_is() -> None:
    found = read_entry(entry(DAMAGED))

    assert isinstance(found, UnreadableEvent)
    assert found.entry.record == DAMAGED


def test_an_event_of_a_newer_release_stops_the_planner_unless_it_is_of_one_trajectory() -> None:
    with pytest.raises(RecordError, match="does not know"):
        read_entry(entry(NEWER))

    assert isinstance(read_entry(entry(NEWER, "g/1/0")), Damage)
