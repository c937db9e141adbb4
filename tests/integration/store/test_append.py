from __future__ import annotations

import pytest

from testkit.runs.run_driver import RunDriver
from testkit.runs.scripts import script
from turnstream.errors import ConflictError, FencedError, GroupTooLargeError, TurnGapError

pytestmark = pytest.mark.redis


TURN_0, TURN_1, OTHER_TURN, SEAL = b"first.0000", b"second1111", b"first.9999", b"seal..2222"


def test_turns_and_seal_are_stored_in_one_call(run: RunDriver) -> None:

    num_stored = run.do(run.append(TURN_0, TURN_1, SEAL, seals=True))

    assert num_stored == 3
    assert run.turns() == [(b"0-1", TURN_0), (b"0-2", TURN_1), (b"0-3", SEAL)]
    assert run.client.hgetall(run.payload_keys.meta) == {
        b"epoch": b"1",
        b"writer": b"w",
        b"turns": b"2",
        b"bytes": b"30",
        b"sealed": b"1",
    }


@pytest.mark.parametrize("num_repeated", [1, 2, 3])
def test_repeated_append_is_stored_once(run: RunDriver, num_repeated: int) -> None:
    records = [TURN_0, TURN_1, SEAL][:num_repeated]
    first = run.append(*records, seals=num_repeated == 3)
    whole = run.append(TURN_0, TURN_1, SEAL, seals=True)

    stored = [run.do(command) for command in (first, first, whole, whole)]

    assert stored == [num_repeated, 0, 3 - num_repeated, 0]
    assert run.turns() == [(b"0-1", TURN_0), (b"0-2", TURN_1), (b"0-3", SEAL)]


def test_trajectory_has_at_most_48_mb_of_turns(run: RunDriver) -> None:
    large = [bytes([65 + turn]) * (8 << 20) for turn in range(6)]
    for turn, record in enumerate(large):
        run.do(run.append(record, first=turn))

    with pytest.raises(GroupTooLargeError, match="turn 6: the trajectory would have 50331652 byt"):
        run.do(run.append(b"more", SEAL, first=6, seals=True))

    assert len(run.turns()) == 6
    assert run.do(run.append(large[5], SEAL, first=5, seals=True)) == 1


def test_refused_append_changes_nothing(run: RunDriver) -> None:
    run.do(run.append(TURN_0))

    for refused, error, message in [
        (run.append(OTHER_TURN, TURN_1), ConflictError, "turn 0 has another content"),
        (run.append(TURN_1, first=2), TurnGapError, "expected 1"),
        (run.append(TURN_1, SEAL, first=2, seals=True), TurnGapError, "expected 1"),
        (run.append(TURN_0, lease="1:x"), ConflictError, "being written by w"),
    ]:
        with pytest.raises(error, match=message):
            run.do(refused)
    assert run.turns() == [(b"0-1", TURN_0)]


def test_only_a_first_call_makes_the_place_of_the_payload(run: RunDriver) -> None:
    with pytest.raises(FencedError, match="never opened"):
        run.do(run.append(TURN_0, lease="1"))
    assert run.client.exists(*run.payload_keys) == 0

    assert run.do(run.append()) == 0  # it has no records, and only makes the place
    assert run.do(run.append(TURN_0, lease="1")) == 1


def test_seal_follows_all_turns_and_nothing_follows_it(run: RunDriver) -> None:
    run.do(run.append(TURN_0, TURN_1))
    with pytest.raises(ConflictError, match="turn 1 is stored, not the seal"):
        run.do(run.append(TURN_0, SEAL, seals=True))
    run.do(run.append(SEAL, first=2, seals=True))

    for refused in (
        run.append(TURN_1, first=2),
        run.append(TURN_1, SEAL, first=2, seals=True),
        run.append(OTHER_TURN, first=2, seals=True),
    ):
        with pytest.raises(ConflictError, match="sealed"):
            run.do(refused)
    assert run.turns() == [(b"0-1", TURN_0), (b"0-2", TURN_1), (b"0-3", SEAL)]


def test_conflicts_are_counted_and_the_last_is_named(run: RunDriver) -> None:
    note = script("note_conflict")

    for name in ("g/0/0", "g/1/0"):
        run.do(note((run.keys.conflicts,), name, "turn 0 has another content"))

    assert run.client.hmget(run.keys.conflicts, "num", "last") == [
        b"2",
        b"g/1/0: turn 0 has another content",
    ]
