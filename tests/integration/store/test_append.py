from __future__ import annotations

import pytest

from testkit.run_driver import RunDriver
from testkit.scripts import script
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


def test_another_content_is_a_conflict_and_changes_nothing(run: RunDriver) -> None:
    run.do(run.append(TURN_0))

    with pytest.raises(ConflictError, match="turn 0 has another content"):
        run.do(run.append(OTHER_TURN, TURN_1))

    assert run.turns() == [(b"0-1", TURN_0)]


def test_a_gap_is_refused_with_the_turn_that_is_missing(run: RunDriver) -> None:
    run.do(run.append(TURN_0))

    with pytest.raises(TurnGapError, match="expected 1"):
        run.do(run.append(TURN_1, first=2))
    with pytest.raises(TurnGapError, match="expected 1"):
        run.do(run.append(TURN_1, SEAL, first=2, seals=True))

    assert run.turns() == [(b"0-1", TURN_0)]


def test_only_a_first_call_makes_the_place_of_the_payload(run: RunDriver) -> None:

    with pytest.raises(FencedError, match="never opened"):
        run.do(run.append(TURN_0, lease="1"))

    assert run.client.exists(*run.payload_keys) == 0


def test_a_first_call_without_records_only_makes_the_place(run: RunDriver) -> None:

    assert run.do(run.append()) == 0
    assert run.do(run.append(TURN_0, lease="1")) == 1


def test_two_writers_cannot_share_an_epoch(run: RunDriver) -> None:
    run.do(run.append(TURN_0))

    with pytest.raises(ConflictError, match="being written by w"):
        run.do(run.append(TURN_0, lease="1:x"))


def test_nothing_follows_the_seal(run: RunDriver) -> None:
    run.do(run.append(TURN_0, SEAL, seals=True))

    for refused in (
        run.append(TURN_1, first=1),
        run.append(TURN_1, SEAL, first=1, seals=True),
        run.append(OTHER_TURN, first=1, seals=True),
    ):
        with pytest.raises(ConflictError, match="sealed"):
            run.do(refused)
    assert run.turns() == [(b"0-1", TURN_0), (b"0-2", SEAL)]


def test_a_seal_cannot_cut_off_stored_turns(run: RunDriver) -> None:
    run.do(run.append(TURN_0, TURN_1))

    with pytest.raises(ConflictError, match="turn 1 is stored, not the seal"):
        run.do(run.append(TURN_0, SEAL, seals=True))


def test_conflicts_are_counted_and_the_last_is_named(run: RunDriver) -> None:
    note = script("note_conflict")

    for name in ("g/0/0", "g/1/0"):
        run.do(note((run.keys.conflicts,), name, "turn 0 has another content"))

    assert run.client.hmget(run.keys.conflicts, "num", "last") == [
        b"2",
        b"g/1/0: turn 0 has another content",
    ]
