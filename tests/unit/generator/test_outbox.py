"""The outbox without a store: rounds are taken, and answered by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import (
    ExecAbortError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from turnstream.errors import (
    ConflictError,
    StoreFullError,
    StoreUnavailableError,
)
from turnstream.generator.outbox.calls import (
    SCRIPTS,
)
from turnstream.generator.outbox.receipts import Delivery
from turnstream.generator.outbox.trajectory_queue import Lane
from turnstream.store.client.backoff import FIRST_PAUSE_S
from turnstream.store.client.keys import trajectory_keys

NewDesk = Callable[..., Any]
OOM = OutOfMemoryError("command not allowed")


def payload_of(lane: Lane) -> tuple[str, ...]:
    return trajectory_keys("r", lane.trajectory_id)


def test_one_round_is_on_its_way_at_a_time(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    desk.append(lane)

    taken = desk.take()
    desk.append(lane)

    assert taken is not None
    assert desk.take() is None
    assert not desk.outbox.is_idle


def test_lost_calls_are_sent_again_first_and_in_order(new_desk: NewDesk) -> None:
    desk = new_desk()
    one, other, third = desk.opened(3)
    desk.append(one)
    desk.append(other)

    lost = desk.lose()
    desk.append(third)
    desk.append(one)
    desk.wait_out()
    again = desk.take()

    assert again is not None
    assert lost.commands[0].keys == again.commands[0].keys
    assert [c.keys for c in again.commands] == [payload_of(lane) for lane in (one, other, third)]
    assert desk.records(again) == [2, 1, 1]


def test_a_lost_connection_means_that_the_server_may_have_forgotten_the_scripts(
    new_desk: NewDesk,
) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    desk.append(lane)

    lost = desk.lose()
    desk.wait_out()
    again = desk.take()

    assert again is not None
    assert (lost.loads_scripts, again.loads_scripts) == (False, True)
    assert again.num_replies == len(SCRIPTS) + 2 + 1
    assert again.pack().count(b"LOAD") == len(SCRIPTS)
    assert again.pack().count(b"\r\nappendfsync") == 1


def test_unknown_script_is_loaded_at_once_but_only_once(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened()
    desk.append(lane)

    desk.answer(NoScriptError("no script"))
    again = desk.answer(NoScriptError("no script"))

    assert again.loads_scripts
    assert desk.take() is None
    assert desk.outbox.pause_s(desk.now_s) == pytest.approx(FIRST_PAUSE_S)


def test_a_full_server_is_left_alone_and_asked_again(new_desk: NewDesk) -> None:
    desk = new_desk()
    one, other = desk.opened(2)
    receipts = [desk.append(one), desk.append(other)]

    desk.answer(1, OOM)
    was_paused = desk.take() is None
    desk.wait_out()
    again = desk.answer(1)

    assert was_paused
    sent = [c.keys for c in again.commands if c.script.name != "read_waits"]
    assert sent == [payload_of(other)]
    assert [receipt.is_done for receipt in receipts] == [True, True]
    assert desk.outbox.inflight.statistics().num_retries == 1


@pytest.mark.parametrize(
    ("sync", "is_grouped"),
    [("always", True), ("everysec", False), (NoPermissionError("no CONFIG"), True)],
)
def test_round_is_one_write_if_the_store_may_sync_before_answers(
    new_desk: NewDesk, sync: Any, is_grouped: bool
) -> None:
    desk = new_desk()
    for lane in desk.opened(2, sync=sync):
        desk.append(lane)

    sent = desk.take()

    assert sent is not None
    assert sent.is_grouped == is_grouped
    assert (sent.pack().count(b"MULTI"), sent.pack().count(b"EXEC")) == (is_grouped, is_grouped)
    assert sent.num_replies == (4 if is_grouped else 2)


def test_a_round_of_one_call_needs_no_group(new_desk: NewDesk) -> None:
    desk = new_desk()
    (lane,) = desk.opened(sync="always")
    desk.append(lane)

    sent = desk.take()

    assert sent is not None
    assert not sent.is_grouped


def test_calls_of_one_write_are_answered_one_by_one(new_desk: NewDesk) -> None:
    desk = new_desk()
    one, other = desk.opened(2, sync="always")
    receipts = [desk.append(one), desk.append(other)]

    desk.answer_group(b"QUEUED", b"QUEUED", executed=[1, ResponseError("CONFLICT turn 0")])

    assert [receipt.is_done for receipt in receipts] == [True, True]
    assert one.error is None
    assert isinstance(other.error, ConflictError)


def test_full_server_that_refused_one_write_gets_single_calls(new_desk: NewDesk) -> None:
    desk = new_desk()
    one, other, third = desk.opened(3, sync="always")
    desk.append(one)
    end = desk.seal(one)
    desk.answer(1)
    desk.append(other)
    desk.append(third)

    refused = desk.answer_group(b"QUEUED", OOM, OOM, executed=ExecAbortError("because of: OOM"))
    desk.wait_out()
    again = desk.take()

    assert desk.said(refused) == ["post_sealed", "append", "append"]
    assert again is not None
    assert not again.is_grouped
    assert again.commands == refused.commands
    desk.outbox.answered(again, replies=[[b"OK"], OOM, OOM], now_s=desk.now_s)
    assert end.is_done
    desk.wait_out()
    desk.wait_out()
    still_full = desk.answer(OOM, OOM)
    desk.wait_out()
    emptied = desk.answer(1, 1)
    assert (still_full.is_grouped, emptied.is_grouped) == (False, False)
    desk.append(other)
    desk.append(third)
    assert desk.answer_group(b"QUEUED", b"QUEUED", executed=[1, 1]).is_grouped


def test_invalid_call_does_not_fail_the_others_of_its_write(
    new_desk: NewDesk,
) -> None:
    desk = new_desk()
    one, other = desk.opened(2, sync="always")
    receipts = [desk.append(one), desk.append(other)]

    desk.answer_group(
        b"QUEUED", ResponseError("CONFLICT odd"), executed=ExecAbortError("previous errors")
    )
    desk.wait_out()
    desk.answer(1)

    assert [receipt.is_done for receipt in receipts] == [True, True]
    assert one.error is None
    assert isinstance(other.error, ConflictError)


def test_calls_refused_by_a_full_server_are_repeated_in_order(new_desk: NewDesk) -> None:
    desk = new_desk()
    lanes = desk.opened(3)
    for lane in lanes:
        desk.append(lane)

    refused = desk.answer(OOM, OOM, OOM)
    desk.wait_out()
    again = desk.answer(1, 1, 1)

    assert again.commands[:3] == refused.commands
    assert desk.said(again)[3:] == ["read_waits"]


def test_nothing_accepted_fails_before_the_timeout(new_desk: NewDesk) -> None:
    desk = new_desk(timeout_s=10.0)
    (lane,) = desk.opened()
    receipt = desk.append(lane)

    while desk.now_s < 110.0:
        assert not receipt.is_done
        desk.answer(OOM)
        desk.wait_out()
    desk.answer(OOM)

    with pytest.raises(StoreFullError, match=r"for 10 s: the store .* has been full"):
        receipt.raise_error()
    assert desk.outbox.is_idle
    assert desk.outbox.inflight.has_capacity_for_group(1 << 20)


def test_a_round_is_bounded_but_takes_at_least_one_turn(new_desk: NewDesk) -> None:
    desk = new_desk(max_inflight_bytes=1 << 30)
    one, other = desk.opened(2)
    for _ in range(3):
        desk.append(one, response="B" * 200_000)
    desk.seal(one)
    desk.append(other)

    rounds = [desk.answer(1, 1), desk.answer(1), desk.answer(2)]

    assert [desk.records(sent) for sent in rounds] == [[1, 1], [1], [2]]  # the seal comes last


def test_giving_everything_up_settles_everything_but_leaves_live_trajectories_alone(
    new_desk: NewDesk,
) -> None:
    desk = new_desk()
    live, sending = desk.opened(2)
    receipt = desk.append(sending)
    asking, opened, closing = Delivery(), Delivery(), Delivery()
    desk.asked(opened=asking)
    sent = desk.take()
    desk.asked(opened=opened)
    desk.outbox.close_run("", closing)

    desk.outbox.fail_all(StoreUnavailableError("enough"))
    assert sent is not None
    desk.outbox.answered(sent, replies=[1], now_s=desk.now_s)

    assert all(delivery.errors for delivery in (receipt, asking, opened, closing))
    assert (live.error, desk.outbox.is_idle) == (None, True)


def test_writes_fail_with_reasons_after_a_long_silence(
    new_desk: NewDesk,
) -> None:
    desk = new_desk(timeout_s=10.0)
    one, other = desk.opened(2)
    receipts = [desk.append(one), desk.append(other)]
    sent = desk.take()
    assert sent is not None

    desk.now_s += 10.4
    desk.outbox.expire(desk.now_s)
    were_done = [receipt.is_done for receipt in receipts]
    desk.now_s += desk.outbox.ends_in_s(desk.now_s)
    desk.outbox.expire(desk.now_s)
    desk.outbox.answered(sent, replies=[1, 1], now_s=desk.now_s)

    assert were_done == [False, False]
    assert desk.now_s == pytest.approx(110.5)
    errors = [next(iter(receipt.errors.values())) for receipt in receipts]
    for error, lane in zip(errors, (one, other), strict=True):
        assert isinstance(error, StoreUnavailableError)
        assert [reason.kind for reason in error.reasons] == ["not_acknowledged", "store_silent"]
        assert error.reasons[0].facts["sample"] == lane.key.sample
        assert error.reasons[1].facts == {"address": "10.0.0.7:6379", "since_s": 10.5}
    assert desk.outbox.is_idle


def test_after_it_gave_up_on_a_round_it_asks_which_store_answers(new_desk: NewDesk) -> None:
    desk = new_desk(timeout_s=10.0)
    (lane,) = desk.opened()
    desk.append(lane)
    desk.take()
    desk.now_s += 11.0
    desk.outbox.expire(desk.now_s)

    desk.asked()
    sent = desk.take()

    assert sent is not None
    assert sent.loads_scripts


def test_outage_counts_from_the_unanswered_round(
    new_desk: NewDesk,
) -> None:
    desk = new_desk(timeout_s=40.0)
    (lane,) = desk.opened()
    receipt = desk.append(lane)
    for silent_s in (30.0, 10.0):
        sent = desk.take()
        assert sent is not None
        desk.now_s += silent_s
        desk.outbox.lost(sent, error=RedisTimeoutError("30 s"), now_s=desk.now_s)
        desk.wait_out()

    assert desk.now_s < 141.0
    with pytest.raises(StoreUnavailableError, match="took no writes for 40 s") as caught:
        receipt.raise_error()
    silent = caught.value.reasons[-1]
    assert (silent.kind, silent.facts["since_s"]) == ("store_silent", pytest.approx(40.0, abs=0.1))


def test_refusal_of_full_store_is_reported_as_full(new_desk: NewDesk) -> None:
    desk = new_desk(timeout_s=10.0)
    (lane,) = desk.opened()
    receipt = desk.append(lane)
    while not receipt.is_done:
        desk.answer(OOM)
        desk.wait_out()

    (error,) = receipt.errors.values()
    assert [reason.kind for reason in error.reasons] == ["not_acknowledged", "store_full"]
    assert type(error) is StoreFullError
