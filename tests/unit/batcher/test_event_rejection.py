"""How a leader reads an event that is not what it should be."""

from __future__ import annotations

import pytest

from testkit import sealed
from turnstream.errors import RecordError, UnknownFormatError
from turnstream.records import framing
from turnstream.records.events import encode_event
from turnstream.records.framing import EVENT, write_frame
from turnstream.types import RewardPosted, RunClosed, TrajectoryKey
from turnstream_server.batcher.planner.dead_letters import UnreadableEvent, read_entry
from turnstream_server.bus.core.events import EventEntry

SEAL = sealed("g", sample=1)
KEY = TrajectoryKey("g", sample=1)
DAMAGED = encode_event(SEAL)[:-1] + b"x"
NEWER_KIND = write_frame(EVENT, b"")


def entry(record: bytes, posted_for: str = "") -> EventEntry:
    return EventEntry("1-0", record, posted_for)


@pytest.mark.parametrize("event", [SEAL, RewardPosted(key=KEY, reward=1.0)])
def test_event_posted_for_its_own_trajectory_is_accepted(event: object) -> None:
    record = encode_event(event)  # type: ignore[arg-type]  # one of the union

    assert read_entry(entry(record, "g/1/0")) == event


def test_damaged_seal_ends_the_trajectory_that_it_was_posted_for() -> None:
    found = read_entry(entry(DAMAGED, "g/1/0"))

    assert isinstance(found, UnreadableEvent)
    assert found.key == KEY
    assert "checksum" in found.reason


def test_seal_that_names_another_trajectory_ends_its_own() -> None:
    found = read_entry(entry(encode_event(SEAL), "g/2/0"))

    assert isinstance(found, UnreadableEvent)
    assert found.key == TrajectoryKey("g", sample=2)
    assert "sample=1" in found.reason


def test_a_generator_cannot_close_the_run_with_a_seal() -> None:
    found = read_entry(entry(encode_event(RunClosed()), "g/1/0"))

    assert found == UnreadableEvent("what was posted for it is a RunClosed", KEY)


@pytest.mark.parametrize("posted_for", ["g/1", "g/1/x", "g/+1/0", "g/01/0", "g/-1/0", "/1/0"])
def test_seal_with_damaged_field_t_ends_what_its_record_names(posted_for: str) -> None:
    found = read_entry(entry(encode_event(SEAL), posted_for))

    assert isinstance(found, UnreadableEvent)
    assert found.key == KEY
    assert posted_for in found.reason


def test_damaged_event_without_field_t_ends_no_trajectory() -> None:
    found = read_entry(entry(DAMAGED))

    assert isinstance(found, UnreadableEvent)
    assert found.key is None


def test_unknown_kind_of_event_ends_the_trajectory_it_was_posted_for() -> None:
    with pytest.raises(RecordError, match="newer release"):
        read_entry(entry(NEWER_KIND))

    found = read_entry(entry(NEWER_KIND, "g/1/0"))

    assert isinstance(found, UnreadableEvent)
    assert found.key == KEY


@pytest.mark.parametrize("posted_for", ["", "g/1/0"])
def test_newer_version_of_a_record_stops_the_leader(
    posted_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(framing, "MAJOR_VERSION", 1)
        record = encode_event(SEAL)

    with pytest.raises(UnknownFormatError, match="newer release"):
        read_entry(entry(record, posted_for))
