"""Room for what is on its way, in bytes, without a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.exceptions import (
    ResponseError,
)

NewDesk = Callable[..., Any]


def test_room_is_counted_in_bytes_and_there_is_always_some_for_one(new_desk: NewDesk) -> None:
    desk = new_desk(max_inflight_bytes=100)
    (lane,) = desk.opened()

    before = (
        desk.outbox.inflight.has_capacity_for_turn(10**9),
        desk.outbox.inflight.has_capacity_for_group(10**9),
    )
    desk.append(lane)
    during = (
        desk.outbox.inflight.has_capacity_for_turn(100),
        desk.outbox.inflight.has_capacity_for_group(100),
    )
    desk.answer(1)

    assert (before, during) == ((True, True), (False, False))
    assert desk.outbox.inflight.statistics().inflight_bytes == 0


def test_waiting_groups_take_no_space_from_open_trajectories(new_desk: NewDesk) -> None:
    desk = new_desk(max_inflight_bytes=100)
    (lane,) = desk.asked()
    desk.append(lane)
    desk.answer(ResponseError("WAIT [7-0] no capacity"))

    waiting = (
        desk.outbox.inflight.has_capacity_for_turn(100),
        desk.outbox.inflight.has_capacity_for_group(100),
    )
    held_bytes = desk.outbox.inflight.statistics().inflight_bytes
    desk.outbox.woken()
    desk.answer([1])
    admitted = desk.outbox.inflight.has_capacity_for_turn(100)

    assert waiting == (True, False)
    assert not admitted
    assert desk.outbox.inflight.statistics().inflight_bytes == held_bytes > 0
