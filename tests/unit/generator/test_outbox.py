"""The outbox without a store: rounds are taken, and answered by hand."""

from __future__ import annotations

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

from testkit.runs.outboxes import OutboxDriver, driver_with_queue
from turnstream.errors import ConflictError, StoreFullError, StoreUnavailableError
from turnstream.generator.outbox.receipts import PendingWrite
from turnstream.generator.outbox.waits import Outage
from turnstream.generator.outbox.writes import SendQueues, TrajectoryQueue
from turnstream.generator.requests import SCRIPTS
from turnstream.generator.transport.transport import num_replies, pack_round
from turnstream.store.client.backoff import FIRST_PAUSE_S
from turnstream.store.client.keys import trajectory_keys

OOM = OutOfMemoryError("command not allowed")


def payload_of(queue: TrajectoryQueue) -> tuple[str, ...]:
    return trajectory_keys("r", queue.trajectory_id)


def test_one_round_is_on_its_way_at_a_time() -> None:
    driver, queue = driver_with_queue()
    driver.append(queue)

    driver.take_round()
    driver.append(queue)

    assert driver.take() is None
    assert not driver.outbox.is_idle


def test_lost_calls_are_sent_again_first_and_in_order() -> None:
    driver = OutboxDriver()
    one, other, third = driver.open_queues(3)
    driver.append(one)
    driver.append(other)

    lost = driver.lose_round()
    driver.append(third)
    driver.append(one)
    driver.skip_pause()
    again = driver.take_round()

    assert lost.commands[0].keys == again.commands[0].keys
    assert [c.keys for c in again.commands] == [payload_of(queue) for queue in (one, other, third)]
    assert driver.record_counts(again) == [2, 1, 1]


def test_scripts_are_loaded_again_after_a_lost_connection() -> None:
    driver, queue = driver_with_queue()
    driver.append(queue)

    lost = driver.reconnect()
    again = driver.take_round()

    assert (lost.is_first, again.is_first) == (False, True)
    assert num_replies(again) == len(SCRIPTS) + 2 + 1
    assert pack_round(again).count(b"LOAD") == len(SCRIPTS)
    assert pack_round(again).count(b"\r\nappendfsync") == 1


def test_unknown_script_is_loaded_at_once_but_only_once() -> None:
    driver, queue = driver_with_queue()
    driver.append(queue)

    driver.answer(NoScriptError("no script"))
    again = driver.answer(NoScriptError("no script"))

    assert again.is_first
    assert driver.take() is None
    assert driver.outbox.pause_s(driver.now_s) == pytest.approx(FIRST_PAUSE_S)


def test_full_server_gets_the_refused_call_again_after_a_pause() -> None:
    driver = OutboxDriver()
    one, other = driver.open_queues(2)
    receipts = [driver.append(one), driver.append(other)]

    driver.answer(1, OOM)
    was_paused = driver.take() is None
    driver.skip_pause()
    again = driver.answer(1)

    assert was_paused
    sent = [c.keys for c in again.commands if c.script.name != "read_waits"]
    assert sent == [payload_of(other)]
    assert [receipt.is_done for receipt in receipts] == [True, True]
    assert driver.outbox.inflight.statistics().num_retries == 1


@pytest.mark.parametrize(
    ("sync", "is_grouped"),
    [("always", True), ("everysec", False), (NoPermissionError("no CONFIG"), True)],
)
def test_round_is_one_write_if_the_store_may_sync_before_answers(
    sync: Any, is_grouped: bool
) -> None:
    driver = OutboxDriver(keep_s=5.0)
    queues = driver.open_queues(2, sync=sync)
    assert driver.outbox.is_on_disk == (sync == "always")  # nothing is kept for such a store
    for queue in queues:
        driver.append(queue)

    sent = driver.take_round()

    assert sent.is_grouped == is_grouped
    assert (pack_round(sent).count(b"MULTI"), pack_round(sent).count(b"EXEC")) == (
        is_grouped,
        is_grouped,
    )
    assert num_replies(sent) == (4 if is_grouped else 2)


def test_calls_of_one_write_are_answered_one_by_one() -> None:
    driver = OutboxDriver()
    one, other = driver.open_queues(2, sync="always")
    receipts = [driver.append(one), driver.append(other)]

    driver.answer_group(b"QUEUED", b"QUEUED", executed=[1, ResponseError("CONFLICT turn 0")])

    assert [receipt.is_done for receipt in receipts] == [True, True]
    assert one.error is None
    assert isinstance(other.error, ConflictError)
    driver.answer(1)  # the count of the conflict
    driver.append(one)
    assert not driver.take_round().is_grouped  # one call needs no group


def test_full_server_that_refused_one_write_gets_single_calls() -> None:
    driver = OutboxDriver()
    one, other, third = driver.open_queues(3, sync="always")
    driver.append(one)
    end = driver.seal(one)
    driver.answer(1)
    driver.append(other)
    driver.append(third)

    refused = driver.answer_group(b"QUEUED", OOM, OOM, executed=ExecAbortError("because of: OOM"))
    driver.skip_pause()
    again = driver.take_round()

    assert driver.script_names(refused) == ["post_sealed", "append", "append"]
    assert not again.is_grouped
    assert again.commands == refused.commands
    driver.answered(again, [[b"OK"], OOM, OOM])
    assert end.is_done
    driver.skip_pause()
    driver.skip_pause()
    still_full = driver.answer(OOM, OOM)
    driver.skip_pause()
    emptied = driver.answer(1, 1)
    assert (still_full.is_grouped, emptied.is_grouped) == (False, False)
    driver.append(other)
    driver.append(third)
    assert driver.answer_group(b"QUEUED", b"QUEUED", executed=[1, 1]).is_grouped


def test_invalid_call_does_not_fail_the_others_of_its_write() -> None:
    driver = OutboxDriver()
    one, other = driver.open_queues(2, sync="always")
    receipts = [driver.append(one), driver.append(other)]

    driver.answer_group(
        b"QUEUED", ResponseError("CONFLICT odd"), executed=ExecAbortError("previous errors")
    )
    driver.skip_pause()
    driver.answer(1)

    assert [receipt.is_done for receipt in receipts] == [True, True]
    assert one.error is None
    assert isinstance(other.error, ConflictError)


def test_nothing_accepted_fails_before_the_timeout() -> None:
    driver, queue = driver_with_queue(timeout_s=10.0)
    receipt = driver.append(queue)

    while driver.now_s < 110.0:
        assert not receipt.is_done
        driver.answer(OOM)
        driver.skip_pause()
    driver.answer(OOM)

    with pytest.raises(StoreFullError, match=r"for 10 s: the store .* has been full") as full:
        receipt.raise_error()
    assert [reason.kind for reason in full.value.reasons] == ["not_acknowledged", "store_full"]
    assert driver.outbox.is_idle
    assert driver.outbox.inflight.has_capacity_for_group(1 << 20)


def test_a_round_is_bounded_but_takes_at_least_one_turn() -> None:
    driver = OutboxDriver(max_inflight_bytes=1 << 30)
    one, other = driver.open_queues(2)
    for _ in range(3):
        driver.append(one, response="B" * 200_000)
    driver.seal(one)
    driver.append(other)

    rounds = [driver.answer(1, 1), driver.answer(1), driver.answer(2)]

    assert [driver.record_counts(sent) for sent in rounds] == [
        [1, 1],
        [1],
        [2],
    ]  # the seal comes last


def test_call_has_a_thousand_turns_or_256_seals_at_most() -> None:
    driver, queue = driver_with_queue()
    for _ in range(1_001):
        driver.append(queue)
    send_queues = SendQueues()
    for size in [1] * 300 + [400_000] * 4 + [2 << 20]:
        send_queues.seals.append(
            TrajectoryQueue(queue.key, queue.trajectory_id, seal_record=bytes(size))
        )

    turns = [driver.record_counts(driver.answer(1)) for _ in range(2)]
    seals = [[len(each.seal_record) for each in send_queues.take_seals()] for _ in range(5)]

    assert turns == [[1_000], [1]]
    assert [len(each) for each in seals] == [256, 46, 2, 1, 0]
    assert seals[2:4] == [[400_000] * 2, [2 << 20]]  # a seal that is longer goes alone


def test_fail_all_settles_every_write_and_keeps_idle_trajectories() -> None:
    driver = OutboxDriver()
    live, sending = driver.open_queues(2)
    receipt = driver.append(sending, response="B" * 5_000)
    asking, opened, closing = PendingWrite(), PendingWrite(), PendingWrite()
    driver.request(opened=asking)
    sent = driver.take_round()
    driver.request(opened=opened)
    driver.outbox.run_calls.close_run("", closing)

    driver.outbox.fail_all(StoreUnavailableError("enough"))
    driver.answered(sent, [1])

    assert all(delivery.errors for delivery in (receipt, asking, opened, closing))
    assert (live.error, driver.outbox.is_idle) == (None, True)
    assert driver.take() is None  # no bytes are reserved for what has failed


def test_writes_fail_with_reasons_after_a_long_silence() -> None:
    driver = OutboxDriver(timeout_s=10.0)
    one, other = driver.open_queues(2)
    receipts = [driver.append(one), driver.append(other)]
    sent = driver.take_round()

    driver.now_s += 10.4
    driver.outbox.expire(driver.now_s)
    were_done = [receipt.is_done for receipt in receipts]
    driver.skip_to_deadline()
    driver.outbox.expire(driver.now_s)
    driver.answered(sent, [1, 1])

    assert were_done == [False, False]
    assert driver.now_s == pytest.approx(110.5)
    errors = [next(iter(receipt.errors.values())) for receipt in receipts]
    for error, queue in zip(errors, (one, other), strict=True):
        assert isinstance(error, StoreUnavailableError)
        assert [reason.kind for reason in error.reasons] == ["not_acknowledged", "store_away"]
        assert error.reasons[0].facts["sample"] == queue.key.sample
        assert error.reasons[1].facts == {"address": "10.0.0.7:6379", "since_s": 10.5}
    assert driver.outbox.is_idle
    driver.request()
    assert driver.take_round().is_first  # the store is identified again


def test_outage_counts_from_the_unanswered_round() -> None:
    driver, queue = driver_with_queue(timeout_s=40.0)
    receipt = driver.append(queue)
    for silent_s in (30.0, 10.0):
        sent = driver.take_round()
        driver.now_s += silent_s
        driver.outbox.lost(sent, error=RedisTimeoutError("30 s"), now_s=driver.now_s)
        driver.skip_pause()

    assert driver.now_s < 141.0
    with pytest.raises(StoreUnavailableError, match="took no writes for 40 s") as caught:
        receipt.raise_error()
    silent = caught.value.reasons[-1]
    assert (silent.kind, silent.facts["since_s"]) == ("store_away", pytest.approx(40.0, abs=0.1))


def test_waiting_groups_take_no_space_from_open_trajectories() -> None:
    driver = OutboxDriver(max_inflight_bytes=100)
    counts = driver.outbox.inflight
    found: list[tuple[bool, bool, bool]] = []

    def look(num_bytes: int = 100) -> None:
        capacity = counts.has_capacity_for_turn(num_bytes), counts.has_capacity_for_group(num_bytes)
        found.append((*capacity, counts.statistics().inflight_bytes > 0))

    look(10**9)  # one write always fits
    (queue,) = driver.request()
    driver.append(queue)
    driver.answer(ResponseError("WAIT [7-0] no capacity"))
    look()
    driver.outbox.admissions.woken()
    driver.answer([1])
    look()
    driver.answer(1)
    look()

    empty = (True, True, False)
    assert found == [empty, (True, False, True), (False, False, True), empty]


def outage(timeout_s: float = 100.0, jitter: float = 1.0) -> Outage:
    return Outage(timeout_s, jitter=lambda: jitter, address="?")


def pauses(trying: Outage, num_failures: int) -> list[float]:
    """Fail as soon as another try may be made."""
    now_s = 50.0
    found = []
    for _ in range(num_failures):
        trying.failed("gone", now_s, since_s=now_s)
        found.append(trying.pause_s(now_s))
        now_s += found[-1]
    return found


def test_pauses_double_up_to_a_second_and_jitter_halves_them_at_most() -> None:
    assert pauses(outage(), 7) == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert pauses(outage(jitter=0.0), 2) == pytest.approx([0.025, 0.05])


def test_outage_ends_with_success_or_its_deadline() -> None:
    trying = outage(timeout_s=10.0)
    pauses(trying, 7)
    trying.end()
    assert trying.pause_s(50.0) == 0.0

    ended = [trying.failed("gone", now_s, since_s=now_s) for now_s in (1000.0, 1009.99, 1010.0)]

    assert ended == [False, False, True]
    assert trying.pause_s(1009.99) == pytest.approx(0.01)  # no pause goes beyond the deadline
