"""Room for what trajectories outgrow, without a store: asked for in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from turnstream.store.run.budget import FIRST_BYTES, with_block
from turnstream.types import TrajectoryKey

NewDesk = Callable[..., Any]


def test_bytes_are_reserved_in_blocks_as_a_trajectory_grows(
    new_desk: NewDesk,
) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    rounds = []

    for _ in range(12):
        desk.append(lane, response="B" * 1_000)
        rounds.append(desk.answer(1))

    size = lane.num_bytes // 12
    asked = [
        (number, *desk.reserved(sent)[0])
        for number, sent in enumerate(rounds)
        if desk.reserved(sent)
    ]
    first, second = FIRST_BYTES // size, (2 * (FIRST_BYTES // size + 1) * size) // size
    assert [number for number, _, _ in asked] == [first, second]
    assert [name for _, name, _ in asked] == ["g/0/0", "g/0/0"]
    assert asked[0][2] == pytest.approx(2 * (first + 1) * size, abs=8_000)


def test_room_is_asked_for_again_after_a_lost_connection(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    desk.append(lane, response="B" * 5_000)

    lost = desk.lose()
    desk.wait_out()
    again = desk.take()

    assert again is not None
    assert desk.reserved(again) == desk.reserved(lost) != []


def test_room_is_asked_for_again_where_the_store_may_have_forgotten_it(new_desk: NewDesk) -> None:
    desk = new_desk(keep_s=5.0)
    (lane,) = desk.opened()
    desk.append(lane, response="B" * 5_000)
    asked = desk.answer(1)
    desk.append(lane)

    desk.lose()
    desk.wait_out()
    desk.answer()
    desk.answer([1])
    again = desk.take()

    assert again is not None
    assert [name for name, _ in desk.reserved(again)] == ["g/0/0"]
    assert desk.reserved(again) >= desk.reserved(asked)


def test_whole_trajectory_reserves_its_exact_size(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.asked()
    desk.append(lane, response="B" * 5_000)
    desk.seal(lane)
    desk.answer([1])

    sent = desk.answer(2)

    assert desk.reserved(sent) == [("g/0/0", lane.num_bytes)]


def test_the_seal_says_how_many_bytes_are_stored(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    desk.append(lane)
    desk.seal(lane)
    desk.answer(2)

    posted = desk.answer([b"OK"])

    assert posted.commands[0].args[1] == f"1:/{lane.num_bytes + len(lane.seal_record)}:w"


def test_stored_turns_of_an_adopted_trajectory_are_reserved_too(
    new_desk: NewDesk,
) -> None:
    desk = new_desk()
    key, num_bytes = TrajectoryKey("g", sample=0), 10 * FIRST_BYTES

    desk.outbox.adopt(key, epoch=4, num_turns=2, num_bytes=num_bytes, now_s=desk.now_s)

    ((name, asked),) = desk.reserved(desk.answer())
    assert (name, asked) == ("g/0/0", with_block(num_bytes))
