"""Groups that ask for leave, without a store: rounds are taken, and answered by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from turnstream.batching.config import BatchingConfig
from turnstream.errors import NotReadyError, WaitKind
from turnstream.generator.outbox.receipts import Delivery
from turnstream.records.configs import encode_config

NewDesk = Callable[..., Any]


def waits_reply() -> list[Any]:
    """The state of a paused run without other obstacles."""
    config = encode_config(BatchingConfig(batch_groups=4, mini_batch_groups=4))
    frontier = [b"stepped", b"0", b"live_groups", b"4", b"opened_groups", b"4", b"paused", b"why"]
    leader = [b"owner", b"batcher", b"expires_ms", b"105000"]
    refills, version, memory, times = [], None, [0, 0, None], [None, None]
    return [
        *(b"100000", frontier, config, leader, [], [], [], 0, 0),
        *(refills, version, memory, 0, [], times, []),
    ]


def kinds(opened: Delivery) -> list[str]:
    """The reasons with which a wait for leave ended, for programs."""
    (error,) = opened.errors.values()
    assert isinstance(error, NotReadyError)
    return [reason.kind for reason in error.reasons]


def test_turns_wait_until_their_trajectory_is_open(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.asked()
    desk.append(lane)

    first, second = desk.answer([1]), desk.answer(1)

    assert desk.said(first) == ["open_group"]
    assert desk.said(second) == ["append"]
    assert second.commands[0].args[0] == "1:w"
    assert desk.outbox.is_idle


def test_a_group_that_must_wait_stands_aside_until_it_is_woken(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    opened = Delivery()
    desk.asked(opened=opened)

    desk.answer(ResponseError("WAIT [7-0] no capacity"))
    desk.append(lane)
    payload = desk.answer(1)
    wake_id, nothing_to_send = desk.outbox.wake_id, desk.take() is None
    desk.outbox.woken()
    again = desk.answer([1])

    assert (wake_id, nothing_to_send) == ("7-0", True)
    assert (desk.said(payload), desk.said(again)) == (["append"], ["open_group"])
    assert opened.is_done
    assert desk.outbox.wake_id is None
    assert desk.outbox.inflight.statistics().num_waits == 1


def test_the_oldest_wake_id_is_listened_from(new_desk: NewDesk) -> None:
    desk = new_desk()
    for wake_id in ("7-0", "9-0"):
        desk.asked()
        desk.answer(ResponseError(f"WAIT [{wake_id}] no capacity"))

    assert desk.outbox.wake_id == "7-0"


def test_a_wait_for_leave_ends_by_its_deadline(new_desk: NewDesk) -> None:
    desk = new_desk(admission_timeout_s=60.0)
    opened = Delivery()
    desk.asked(opened=opened)
    desk.answer(ResponseError("WAIT [7-0] the planner sleeps"))

    desk.wait_out()
    asked_s, asked = desk.now_s, desk.answer(ResponseError("ERR no answer to that"))
    desk.wait_out()
    desk.take()

    assert (asked_s, desk.said(asked)) == (pytest.approx(159.0), ["read_waits"])
    assert desk.now_s == pytest.approx(160.0)
    with pytest.raises(NotReadyError, match="group g: no leave to start within 60 s: the planner"):
        opened.raise_error()


def test_admission_wait_ends_by_its_deadline_while_the_store_is_away(new_desk: NewDesk) -> None:
    desk = new_desk(admission_timeout_s=60.0, timeout_s=600.0)
    opened = Delivery()
    desk.asked(opened=opened)
    desk.answer(ResponseError("WAIT [7-0] the planner sleeps"))

    while not opened.is_done:
        desk.wait_out()
        if (sent := desk.take()) is not None:
            desk.outbox.lost(sent, error=RedisConnectionError("gone"), now_s=desk.now_s)

    assert desk.now_s == pytest.approx(160.0)
    (error,) = opened.errors.values()
    assert isinstance(error, NotReadyError)
    assert [reason.kind for reason in error.reasons] == [WaitKind.NO_LEAVE, WaitKind.STORE_AWAY]
    assert error.reasons[0].facts == {"group": "g", "samples": 3, "waited_s": pytest.approx(60.0)}


def test_one_answer_serves_several_refused_groups(
    new_desk: NewDesk,
) -> None:
    desk = new_desk(admission_timeout_s=60.0)
    asked_s = []
    for _ in range(4):
        desk.asked()
        desk.answer(ResponseError("WAIT [7-0] no capacity"))
        desk.now_s += 2.0

    while desk.outbox.pause_s(desk.now_s) is not None:
        desk.wait_out()
        sent = desk.take()
        if sent is not None:
            asked_s.append(desk.now_s)
            desk.outbox.answered(sent, replies=[ResponseError("ERR no")], now_s=desk.now_s)

    assert asked_s == pytest.approx([159.0, 165.0])
    assert desk.now_s == pytest.approx(166.0)


def test_a_wait_that_is_short_is_asked_about_with_its_group(new_desk: NewDesk) -> None:
    desk = new_desk(admission_timeout_s=0.5)
    opened = Delivery()
    desk.asked(opened=opened)

    sent = desk.answer(ResponseError("WAIT [7-0] no capacity"), waits_reply())
    desk.wait_out()
    desk.take()

    assert desk.said(sent) == ["open_group", "read_waits"]
    assert kinds(opened) == [WaitKind.NO_LEAVE, WaitKind.RUN_PAUSED]


def test_answer_from_before_a_wait_is_not_its_reason(new_desk: NewDesk) -> None:
    desk = new_desk(admission_timeout_s=60.0)
    opened, later = Delivery(), Delivery()
    desk.asked(opened=opened)
    desk.answer(ResponseError("WAIT [7-0] no capacity"))
    desk.wait_out()
    desk.answer(waits_reply())
    desk.now_s += 0.5
    desk.asked(opened=later)
    desk.answer(ResponseError("WAIT [7-0] no capacity"))

    said = [
        [reason.kind for reason in desk.outbox.why.waiting(desk.now_s + 0.1, delivery)]
        for delivery in (opened, later)
    ]

    assert said == [[WaitKind.NO_LEAVE, WaitKind.RUN_PAUSED], [WaitKind.NO_LEAVE]]


def test_a_group_that_is_given_leave_never_asks_why_it_waits(new_desk: NewDesk) -> None:
    desk = new_desk(admission_timeout_s=60.0)
    desk.asked()
    refused = desk.answer(ResponseError("WAIT [7-0] no capacity"))
    desk.now_s += 50.0

    desk.outbox.woken()
    admitted = desk.answer([1])

    assert [desk.said(each) for each in (refused, admitted)] == [["open_group"], ["open_group"]]


def test_group_abandoned_while_it_waits_is_not_requested_again(new_desk: NewDesk) -> None:
    desk = new_desk()
    lanes = desk.asked(2)
    desk.answer(ResponseError("WAIT [7-0] no capacity"))
    ends = [Delivery(), Delivery()]

    for lane, end in zip(lanes, ends, strict=True):
        desk.outbox.abandon(lane, "bored", end=end)

    assert [end.is_done for end in ends] == [True, True]
    assert desk.outbox.is_idle


def test_group_abandoned_while_it_asks_is_abandoned_once_open(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.asked()
    asking = desk.take()
    assert asking is not None
    desk.outbox.abandon(lane, "bored", end=Delivery())

    loads = [b"sha"] * (asking.num_replies - 1)
    desk.outbox.answered(asking, replies=[*loads, [1]], now_s=desk.now_s)

    assert desk.said(desk.answer(1)) == ["abandon"]
    assert desk.outbox.is_idle


def test_admission_wait_ends_by_its_deadline_on_a_silent_store(
    new_desk: NewDesk,
) -> None:
    desk = new_desk(admission_timeout_s=60.0, timeout_s=600.0)
    opened = Delivery()
    desk.asked(opened=opened)
    desk.answer(ResponseError("WAIT [7-0] the planner sleeps"))
    desk.outbox.woken()
    asked = desk.take()

    desk.now_s += desk.outbox.ends_in_s(desk.now_s)
    desk.outbox.expire(desk.now_s)

    assert asked is not None
    assert desk.now_s == pytest.approx(160.0)
    assert kinds(opened) == [WaitKind.NO_LEAVE, WaitKind.STORE_SILENT]


@pytest.mark.parametrize("answer", [[5], ResponseError("WAIT [8-0] no capacity")])
def test_group_opened_after_its_wait_ended_is_abandoned(new_desk: NewDesk, answer: Any) -> None:
    desk = new_desk(admission_timeout_s=60.0, timeout_s=600.0)
    (lane,) = desk.asked()
    desk.answer(ResponseError("WAIT [7-0] no capacity"))
    desk.outbox.woken()
    asked = desk.take()
    assert asked is not None
    desk.now_s += 60.0
    desk.outbox.expire(desk.now_s)

    desk.outbox.answered(asked, replies=[answer], now_s=desk.now_s)
    given_back = desk.take()

    assert lane.error is not None
    assert desk.outbox.wake_id is None
    if isinstance(answer, ResponseError):
        assert given_back is None
    else:
        assert desk.said(given_back) == ["abandon"]
        assert given_back.commands[0].args[:3] == ("g/0/0", "5:w", "its wait for leave had ended")


def test_group_whose_wait_ended_is_not_requested_after_a_lost_round(
    new_desk: NewDesk,
) -> None:
    desk = new_desk(admission_timeout_s=60.0, timeout_s=600.0)
    desk.asked()
    desk.answer(ResponseError("WAIT [7-0] no capacity"))
    desk.outbox.woken()
    asked = desk.take()
    assert asked is not None
    desk.now_s += 60.0
    desk.outbox.expire(desk.now_s)

    desk.outbox.lost(asked, error=RedisConnectionError("gone"), now_s=desk.now_s)
    desk.wait_out()

    assert desk.take() is None
    assert desk.outbox.is_idle
