"""Leases of open trajectories, without a store: renewed, lost, and judged by their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import (
    ResponseError,
)

from turnstream.errors import (
    FencedError,
    RunNotFoundError,
)
from turnstream.generator.outbox.heartbeats import Heartbeats
from turnstream.generator.outbox.trajectory_queue import Lane
from turnstream.types import TrajectoryKey

NewDesk = Callable[..., Any]


def test_leases_are_renewed_every_third_of_the_length_that_the_store_names(
    new_desk: NewDesk,
) -> None:
    desk = new_desk()
    lanes = desk.opened(2)

    sent: list[tuple[float, Any]] = []
    for _ in range(3):
        desk.wait_out()
        (beat,) = desk.answer([30_000, b"OK", b"OK"]).commands
        sent.append((round(desk.now_s - 100.0, 3), (beat.script.name, *beat.args)))

    both = ("heartbeat", "g/0/0", "1:w", "g/1/0", "1:w")
    assert sent == [(0.1, both), (10.1, both), (20.1, both)]
    assert [lane.error for lane in lanes] == [None, None]


def test_publisher_without_open_trajectories_asks_soon_for_the_lease_length() -> None:
    # Leases had become shorter meanwhile: what was opened next was given up.
    beats = Heartbeats()
    first, second = (
        Lane(TrajectoryKey("g", sample), f"g/{sample}/0", epoch=1) for sample in range(2)
    )
    beats.opened(first, now_s=0.0)
    beats.sent(0.1)
    beats.answered(lease_s=30.0)
    beats.ended(first)

    beats.opened(second, now_s=1000.0)
    before = beats.pause_s(1000.0)
    beats.sent(1000.1)
    beats.answered(lease_s=0.6)

    assert before == pytest.approx(0.1)
    assert beats.pause_s(1000.1) == pytest.approx(0.2)


def test_a_publisher_with_nothing_open_sends_no_heartbeat(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    desk.append(lane)
    desk.seal(lane)
    desk.answer(2)
    desk.answer([b"OK"])

    desk.now_s += 1000

    assert desk.take() is None
    assert desk.outbox.pause_s(desk.now_s) is None


def test_a_heartbeat_on_its_way_holds_up_no_flush(new_desk: NewDesk) -> None:
    desk = new_desk()
    desk.opened()
    desk.wait_out()

    beat = desk.take()

    assert beat is not None
    assert desk.outbox.is_idle


def test_lost_heartbeat_is_repeated_when_the_store_may_be_asked(
    new_desk: NewDesk,
) -> None:
    desk = new_desk()
    desk.opened()
    desk.wait_out()

    desk.lose()
    was_paused = desk.take() is None
    desk.wait_out()
    again = desk.answer([30_000, b"OK"])

    assert was_paused
    assert desk.said(again) == ["heartbeat"]
    assert desk.take() is None


def test_a_lost_trajectory_raises_who_has_it_and_disturbs_no_other(new_desk: NewDesk) -> None:
    desk = new_desk()
    one, other = desk.opened(2)
    desk.wait_out()
    waiting = desk.append(one)

    desk.answer(1, [30_000, b"FENCED g/0/0 was taken over by x with epoch 2", b"OK"])

    assert not waiting.errors  # the store took it before it was asked
    for write in (lambda: desk.append(one), lambda: desk.seal(one)):
        with pytest.raises(FencedError, match="g/0/0 was taken over by x with epoch 2"):
            write()
    assert not desk.append(other).errors
    assert desk.outbox.num_open == 1


def test_trajectories_of_a_run_that_is_gone_are_lost_by_their_heartbeat(new_desk: NewDesk) -> None:
    # A generator that plays on for hours must not write into another run of the same name.
    desk = new_desk()
    one, ending = desk.opened(2)
    desk.append(ending)
    desk.seal(ending)
    desk.wait_out()

    desk.answer(2, ResponseError("NORUN no such run"))

    with pytest.raises(RunNotFoundError):
        desk.append(one)
    assert ending.error is None  # its seal is on its way, and is answered by itself
    assert desk.outbox.num_open == 1


def test_trajectory_found_lost_by_a_turn_is_not_lost_twice(
    new_desk: NewDesk,
) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    desk.wait_out()
    waiting = desk.append(lane)

    desk.answer(
        ResponseError("FENCED epoch 2 writes, not 1"),
        [30_000, b"FENCED [abandoned] g/0/0 is abandoned: why"],
    )

    with pytest.raises(FencedError, match="epoch 2 writes"):
        waiting.raise_error()
    with pytest.raises(FencedError, match="epoch 2 writes"):
        desk.append(lane)


def test_a_trajectory_that_ends_is_judged_by_its_end_alone(new_desk: NewDesk) -> None:
    # The planner found the seal and posted it, before this publisher could: to the heartbeat, the
    # trajectory is not open any more.
    desk = new_desk()
    (lane,) = desk.opened()
    desk.append(lane)
    end = desk.seal(lane)
    desk.now_s += 1.0

    desk.answer(2, [30_000, b"FENCED [sealed] g/0/0 is sealed: 1"])
    was_done = end.is_done
    desk.answer([b"DUPLICATE"])

    assert (was_done, end.is_done) == (False, True)
    assert not end.errors


def test_more_leases_than_one_call_takes_travel_in_several() -> None:
    beats = Heartbeats()
    key = TrajectoryKey("g", 0)
    lanes = [Lane(key, f"{n}", epoch=1) for n in range(600)]
    for lane in lanes:
        beats.opened(lane, now_s=0.0)

    calls = beats.due(1.0)

    assert [len(call.lanes) for call in calls] == [256, 256, 88]
    assert [lane for call in calls for lane in call.lanes] == lanes


def slept(desk: Any, *, lease_s: float) -> None:
    """Its lease is known; then nothing happens for longer than that."""
    desk.wait_out()
    desk.answer([round(lease_s * 1000), b"OK"])
    desk.now_s += lease_s + 0.1


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("unknown", "was never opened, or is released"),
        ("abandoned", "is abandoned: it was silent"),
    ],
)
def test_publisher_asks_for_its_leases_after_it_slept(
    new_desk: NewDesk, state: str, why: str, ends: bool
) -> None:
    # Its name was released so long ago that nobody refused it: the place of its payload was made
    # anew by the first turn, and stayed for ever.
    desk = new_desk()
    (lane,) = desk.opened()
    slept(desk, lease_s=30.0)

    waiting = desk.append(lane)
    if ends:
        desk.seal(lane)
    asked = desk.answer([30_000, f"FENCED [{state}] g/0/0 {why}".encode()])

    assert desk.said(asked) == ["heartbeat"]
    with pytest.raises(FencedError, match=why):
        waiting.raise_error()
    assert desk.take() is None


def test_sleeper_that_lost_nothing_continues(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    slept(desk, lease_s=30.0)
    waiting = desk.append(lane)

    rounds = [desk.said(desk.answer(*answers)) for answers in ([[30_000, b"OK"]], [1])]

    assert rounds == [["heartbeat"], ["append"]]
    assert not waiting.errors


def test_late_answer_proves_nothing(
    new_desk: NewDesk,
) -> None:
    # It slept while the answer was on its way.
    desk = new_desk()
    (lane,) = desk.opened()
    desk.wait_out()
    sent = desk.take()
    desk.now_s += 100.0
    desk.outbox.answered(sent, replies=[[30_000, b"OK"]], now_s=desk.now_s)

    desk.append(lane)

    assert desk.said(desk.answer()) == ["heartbeat"]


def test_ending_stored_trajectory_is_judged_by_its_end_after_release(
    new_desk: NewDesk,
) -> None:
    # All of it may have been stored, and trained, before the answer was lost.
    desk = new_desk()
    lane = desk.stored()
    slept(desk, lease_s=30.0)
    desk.append(lane, "C")
    end = desk.seal(lane)

    desk.answer([30_000, b"FENCED [unknown] g/0/0 was never opened, or is released"])

    assert lane.error is None
    assert not end.errors
    assert desk.said(desk.answer(0)) == ["append"]
