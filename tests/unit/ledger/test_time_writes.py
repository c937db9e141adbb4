"""Writes of the time of a run: its clock, its deadlines, its leases and its observers."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turnstream.errors import CorruptRecordError
from turnstream.records.events import encode_event
from turnstream.store.run.groups import LapsedTrajectory
from turnstream.types import DeadlineFired, TrajectoryKey
from turnstream_server.ledger.leadership.leader_fields import (
    ClockFacts,
    ParkFacts,
    Tick,
    advance_clock,
    park,
)
from turnstream_server.ledger.leadership.writes import Position
from turnstream_server.ledger.planning.deadlines import Deadline, abandon, fire, fire_orphaned
from turnstream_server.ledger.planning.settling import Attempt, GroupState
from turnstream_server.ledger.sessions.observers import expire

MS = st.integers(min_value=0, max_value=1_000)
CLOCK = [b"1000", b"5000", b"300"]


def text(number: int | None) -> bytes | None:
    return None if number is None else b"%d" % number


@given(MS | st.none(), MS, MS, MS | st.none(), MS, st.booleans())
@example(2, 0, 0, 1, 0, False)  # a tick that comes late
@example(0, 1, 0, None, 0, False)  # a clock of the server that was set back
def test_clock_never_decreases_and_counts_a_short_gap_alone(
    known_ms: int | None, at_ms: int, most_ms: int, own_ms: int | None, server_ms: int, parked: bool
) -> None:
    facts = ClockFacts(text(known_ms), text(at_ms), text(most_ms), b"0-0 0-0" if parked else None)

    ms, changes = advance_clock(facts, Tick(own_ms, server_ms, most_ms))

    if known_ms is not None:
        assert ms >= known_ms
        assert own_ms is not None or ms - known_ms <= most_ms
        assert not parked or (ms, changes) == (known_ms, None)
    if changes is not None:
        fact, other, *writes = changes.calls()
        assert fact == ("FIELDS", "clock", ("ms", _fact(facts.ms), "at_ms", b"=%d" % at_ms))
        assert other == ("FIELDS", "leader", ("parked", _fact(facts.parked)))
        fields = ("ms", ms, "at_ms", server_ms, "most_ms", most_ms)
        assert writes == [("HSET", "clock", fields)]


def _fact(value: bytes | None) -> bytes:
    return b"" if value is None else b"=" + value


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(MS, MS)), MS, st.integers(0, 4))
def test_silent_observers_expire_once_and_the_newest_are_kept(
    observers: dict[str, tuple[int, int]], run_ms: int, most_kept: int
) -> None:
    entries = {n.encode(): b"%d:%d:60" % observers[n] for n in observers}
    live = {name for name, (_, expires_ms) in observers.items() if expires_ms > run_ms}
    silent = {name: seen for name, (seen, _) in observers.items() if name not in live}

    found = expire(entries, run_ms=run_ms, most_kept=most_kept)

    assert found.next_ms == min((observers[n][1] - run_ms for n in live), default=-1)
    assert {each.name for each in found.expired} == {n for n in silent if observers[n][1]}
    calls = [*found.changes.calls()] if found.changes else []
    dropped = {name for command, _, names in calls if command == "HDEL" for name in names}
    assert len(dropped) == max(0, len(silent) - most_kept)
    kept = [silent[name] for name in silent if name not in dropped]
    assert all(silent[str(name)] <= seen for name in dropped for seen in kept)
    expected = calls[0][2][::2] if calls else ()
    assert {*expected} == (silent.keys() if calls else set())


def test_run_is_parked_only_without_live_observer_lease_and_deadline() -> None:
    facts = ParkFacts(CLOCK, {b"o": b"3:0:60@lab", b"p": b"9:0:60:8"}, now_ms=5_200)
    position = Position("2-0", "3-0")

    changes = park(facts, position)

    assert changes is not None
    calls = [*changes.calls()]
    assert [call for call in calls if call[0] == "SIZE"] == [
        ("SIZE", "leases", ("ZCARD", 0)),
        ("SIZE", "deadlines", ("ZCARD", 0)),
        ("SIZE", "observers", ("HLEN", 2)),
    ]
    assert ("HSET", "clock", ("ms", 1_200, "at_ms", 5_200, "most_ms", 0)) in calls
    assert park(facts._replace(observers={b"o": b"3:9:60"}), position) is None


def test_deadlines_and_leases_end_only_as_they_were_read() -> None:
    lapsed = LapsedTrajectory(key=TrajectoryKey("g", 0), writer="w", epoch=2)

    group, reward, lease = (
        [*each.calls()]
        for each in (
            fire(Deadline("group:g", b"9", b"2:0:3:uid")),
            fire(Deadline("reward:g/0/0", b"9")),
            abandon(lapsed, end_ms=b"7"),
        )
    )

    assert group[:2] == [
        ("FIELDS", "members", ("g", b"=2:0:3:uid")),
        ("SCORE", "deadlines", ("group:g", b"9")),
    ]
    fired = encode_event(DeadlineFired(group_id="g", num_refills=3))
    assert group[-1] == ("XADD", "events", ("*", "r", fired))
    assert reward[:2] == [
        ("SCORE", "deadlines", ("reward:g/0/0", b"9")),
        ("HSET", "rewards", ("g/0/0", "missed")),
    ]
    assert lease[:2] == [
        ("FIELDS", "ledger", ("g/0/0", b"=open:2:w")),
        ("SCORE", "leases", ("g/0/0", b"7")),
    ]
    assert lease[-2:] == [
        ("HINCRBY", "counts", ("open", -1)),
        ("HINCRBY", "counts", ("abandoned", 1)),
    ]


def test_orphaned_group_ends_only_if_no_attempt_has_changed() -> None:
    entries = (b"sealed:1", None)
    attempts = [Attempt(f"g/{sample}/0", each, None) for sample, each in enumerate(entries)]

    calls = [*fire_orphaned(GroupState("g", b"2:open", b"2:0:1:p", None, attempts)).calls()]

    assert ("FIELDS", "frontier", ("closed", b"=1")) in calls
    assert ("FIELDS", "ledger", ("g/0/0", b"=sealed:1", "g/1/0", b"")) in calls
    assert [name for name, _, _ in calls[-2:]] == ["XADD", "ZREM"]


def test_damaged_entry_of_an_observer_is_named() -> None:
    with pytest.raises(CorruptRecordError, match="observers"):
        expire({b"o": b"what"}, run_ms=1, most_kept=1)
