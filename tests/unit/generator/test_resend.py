"""Trajectories that are sent again to a store that may have lost them, without a store."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from testkit.runs.outboxes import OutboxDriver, driver_with_queue, driver_with_seal
from turnstream.errors import ConflictError, FencedError, StoreBehindError, StoreUnavailableError
from turnstream.generator.encode.encoder import TurnRecord
from turnstream.generator.outbox.receipts import PendingWrite
from turnstream.generator.outbox.resend import KeptWrite, ResendBuffer
from turnstream.generator.outbox.writes import Admission, TrajectoryQueue
from turnstream.generator.requests import AppendTurns
from turnstream.generator.transport.transport import num_replies
from turnstream.store.run.rewards import encode_reward
from turnstream.types import GroupOpened, TrajectoryKey, TurnShape


def connect(driver: OutboxDriver, run_id: bytes) -> None:
    """Answer the first round of a new connection to the store with this id."""
    sent = driver.take_round()
    settings = [b"appendfsync", b"everysec"]
    replies = [*[b"sha"] * (num_replies(sent) - 2), b"run_id:" + run_id, settings]
    driver.answered(sent, replies)


def errors(delivery: PendingWrite) -> list[type[Exception]]:
    return [type(error) for error in delivery.errors.values()]


def test_trajectory_ended_by_another_before_it_opened_is_refused() -> None:
    driver = OutboxDriver()
    (queue,) = driver.request()
    receipt, end = driver.append(queue), driver.seal(queue)

    sent = driver.take_round()
    replies = [*[b"sha"] * (num_replies(sent) - 2), [b"appendfsync", b"everysec"]]
    answer = [b"CONFLICT [sealed] g/0/0 is already sealed"]
    driver.answered(sent, [*replies, answer])

    assert (errors(receipt), errors(end)) == ([ConflictError], [ConflictError])
    assert driver.outbox.is_idle


def test_trajectory_written_by_another_is_refused_if_its_seal_was_stored() -> None:
    driver, _, end = driver_with_seal(keep_s=5.0)

    driver.restart()
    driver.answer([b"CONFLICT g/0/0 is being written by x"])

    assert errors(end) == [ConflictError]
    assert driver.outbox.is_idle


def test_resent_turns_are_counted_only_as_resent() -> None:
    driver, queue, _ = driver_with_seal(keep_s=5.0)
    driver.answer([b"OK"])
    before = driver.outbox.inflight.statistics()

    driver.restart()
    num_leases = driver.outbox.tracker.heartbeats.num_open
    driver.answer([1], b"OK")
    held = driver.outbox.inflight.statistics().inflight_bytes
    driver.answer(0)
    driver.answer([b"DUPLICATE"])

    after = driver.outbox.inflight.statistics()
    assert (before.num_trajectories, after.num_trajectories) == (1, 1)
    assert (before.num_turns, after.num_turns) == (1, 1)
    assert (after.num_resent, after.num_duplicates, after.inflight_bytes, held) == (1, 2, 0, 0)
    assert (after.num_restarts, num_leases) == (1, 0)  # none before the group is open again
    assert queue.num_acknowledged == 1


def test_turn_after_resent_ones_names_the_bytes_before_it() -> None:
    driver = OutboxDriver(keep_s=5.0)
    (queue,) = driver.open_queues()
    for response in ("B", "CD"):
        driver.append(queue, response)
        driver.answer(1)

    driver.restart()
    driver.answer([1], b"OK")
    again = driver.answer(2)
    driver.append(queue, "E")
    after = driver.take_round()

    resent, added = [sent.calls[0].request for sent in (again, after)]
    assert isinstance(resent, AppendTurns)
    assert isinstance(added, AppendTurns)
    assert (len(resent.records), resent.bytes_before) == (2, 0)
    assert added.bytes_before == sum(map(len, resent.records))


def test_a_seal_is_sent_again_after_its_turns_were_proven() -> None:
    driver = OutboxDriver(keep_s=5.0)
    queue = driver.open_with_turn()
    driver.now_s += 6.0
    driver.seal(queue)
    driver.answer(1)

    driver.restart()
    again = driver.answer(1)

    assert (driver.script_names(again)[0], driver.record_counts(again)) == ("append", [1])
    assert again.commands[0].args[1:3] == (f"1/{queue.num_bytes}", 1)


def test_ended_trajectory_is_a_loss_until_its_seal_is_posted_again() -> None:
    for answers in ([], [([1], b"OK"), (0,)]):  # nothing is answered, or all but the last call
        driver, _, end = driver_with_seal(keep_s=5.0)
        driver.answer([b"OK"])
        driver.restart()
        for each in answers:
            driver.answer(*each)

        driver.outbox.fail_all(StoreUnavailableError("away"))

        (lost,) = driver.outbox.take_losses()
        assert isinstance(lost, StoreBehindError)
        assert "g/0/0 was acknowledged" in str(lost)
        assert errors(end) == []  # it was acknowledged long ago


def test_missing_turns_of_an_ended_trajectory_are_named() -> None:
    driver, _, _ = driver_with_seal(keep_s=5.0)
    driver.answer([b"OK"])

    driver.restart()
    driver.answer([1], b"OK")
    driver.answer(ResponseError("GAP [0] the next turn is 0"))

    (lost,) = driver.outbox.take_losses()
    assert str(lost).startswith("g/0/0: the store came back without ")
    assert driver.outbox.inflight.statistics().inflight_bytes == 0
    assert driver.outbox.inflight.statistics().num_lost == 1


def test_only_ended_trajectories_are_losses() -> None:
    driver = OutboxDriver(keep_s=5.0)
    given_up, refused = driver.open_queues(2)
    driver.outbox.abandon(given_up, "bored", end=PendingWrite())
    driver.answer(1)
    receipt = driver.append(refused)

    driver.restart()
    driver.answer(
        [b"CONFLICT g/0/0 is being written by x", b"CONFLICT g/1/0 is being written by x"]
    )

    assert errors(receipt) == [ConflictError]
    assert driver.outbox.take_losses() == []


def test_leases_and_bytes_of_a_known_group_are_renewed_at_once() -> None:
    driver, queue = driver_with_queue(keep_s=5.0)
    driver.append(queue, response="B" * 5_000)
    driver.answer(1)
    driver.now_s += 6.0
    driver.append(queue)
    driver.answer(1)

    driver.restart()
    again = driver.take_round()

    assert "heartbeat" in driver.script_names(again)
    assert [name for name, _ in driver.reservations(again)] == ["g/0/0"]


def test_a_seal_that_goes_again_has_the_same_bytes() -> None:
    driver, queue = driver_with_queue(keep_s=5.0)
    driver.append(queue)
    driver.seal(queue)
    first = driver.answer(2)
    driver.answer([b"OK"])

    driver.restart()
    driver.answer([2], b"OK")  # the epoch of another lease
    again = driver.answer(2)

    assert str(again.commands[0].args[0]).startswith("2:")
    assert again.commands[0].args[-1] == first.commands[0].args[-1]


def test_a_seal_that_was_posted_late_is_posted_again() -> None:
    driver, _, _ = driver_with_seal(keep_s=5.0)
    driver.now_s += 6.0
    driver.answer([b"OK"])

    driver.restart()

    assert driver.script_names(driver.answer(0, b"OK"))[0] == "append"
    assert driver.script_names(driver.answer([b"DUPLICATE"])) == ["post_sealed"]


@pytest.mark.parametrize("is_posted", [True, False])
def test_only_an_unposted_seal_fails_with_the_others(is_posted: bool) -> None:
    driver, _, end = driver_with_seal(keep_s=5.0)
    if is_posted:
        driver.answer([b"OK"])

    driver.outbox.fail_all(StoreUnavailableError("away"))

    assert driver.outbox.take_losses() == []
    assert errors(end) == ([] if is_posted else [StoreUnavailableError])


def test_waiting_trajectory_without_writes_fails_with_the_others() -> None:
    driver = OutboxDriver()
    (queue,) = driver.request()

    driver.outbox.fail_all(StoreUnavailableError("away"))

    with pytest.raises(StoreUnavailableError):
        driver.append(queue)


def test_lost_group_waits_for_admission_without_a_deadline() -> None:
    # It was lost when the wait for admission of a new group would have ended.
    driver, _, end = driver_with_seal(keep_s=5.0)
    driver.restart()
    driver.answer(ResponseError("WAIT [7-0] no capacity"))

    driver.now_s += 10 * driver.outbox.admission_timeout_s
    asked = driver.answer(ResponseError("ERR no answer to that"))
    driver.outbox.admissions.woken()
    opened = driver.answer([1])
    payload = driver.answer(2)

    names = [driver.script_names(each) for each in (asked, opened, payload)]
    assert names == [["read_waits"], ["open_group"], ["append"]]
    assert (opened.commands[0].args[1], errors(end)) == ("3+", [])


@pytest.mark.parametrize(
    ("first", "second", "num_lost"),
    [
        *(("OK", "OK", 0), ("OK", "DUPLICATE", 0), ("OK", "LATE", 1), ("LATE", "LATE", 0)),
        ("OK", "LEFT", 0),
    ],
)
def test_late_answer_to_a_repeated_reward_is_reported_as_lost(
    first: str, second: str, num_lost: int
) -> None:
    driver = OutboxDriver(keep_s=5.0)
    posted = encode_reward(TrajectoryKey("g", 7), 1.0, None)
    driver.outbox.run_calls.post_reward(*posted, PendingWrite())
    driver.answer(first.encode())
    driver.request()

    driver.restart()
    sent = driver.answer([1], second.encode())
    assert driver.script_names(sent) == ["open_group", "post_reward"]

    losses = [str(error) for error in driver.outbox.take_losses()]
    said = "a reward was acknowledged, and the store lost it: the group of g/7/0 went on without it"
    assert losses == [said] * num_lost


def test_task_counts_as_written_here_until_it_failed() -> None:
    # Nothing is kept of it, as after a long episode, and its lease is held all the same.
    driver = OutboxDriver(keep_s=0)
    group = GroupOpened(group_id="g", prompt_uid="", num_samples=1)
    epochs = {TrajectoryKey("g", 0): 3}
    (queue,) = driver.outbox.admissions.begin_opened(group, epochs, now_s=driver.now_s)

    num_leases = driver.outbox.tracker.heartbeats.num_open
    is_written = driver.outbox.tracker.has_any(epochs.keys())
    driver.append(queue)
    driver.outbox.fail_all(StoreUnavailableError("away"))

    has_failed = not driver.outbox.tracker.has_any(epochs.keys())
    assert (num_leases, is_written, has_failed) == (1, True, True)


@pytest.mark.parametrize(("second", "num_restarts"), [(b"first", 0), (b"other", 1)])
def test_restart_is_counted_only_if_another_server_answers(
    second: bytes, num_restarts: int
) -> None:
    # A task is taken over another connection: its leases are held before the store has said which.
    driver = OutboxDriver(keep_s=5.0)
    group = GroupOpened(group_id="g", prompt_uid="", num_samples=1)
    driver.outbox.admissions.begin_opened(group, {TrajectoryKey("g", 0): 3}, now_s=driver.now_s)

    connect(driver, b"first")
    driver.answer([3])
    driver.outbox.run_calls.close_run("", PendingWrite())
    driver.reconnect()
    connect(driver, second)

    assert driver.outbox.inflight.statistics().num_restarts == num_restarts


QUEUE = TrajectoryQueue(TrajectoryKey("g", 0), "g/0/0")


def kept(num_bytes: int) -> KeptWrite:
    shape = TurnShape(-1, 0, 1, 1, 1)
    return KeptWrite(QUEUE, TurnRecord(bytes(num_bytes), shape))


def test_write_is_kept_until_a_late_answer_proves_it() -> None:
    buffer = ResendBuffer(keep_s=5.0, max_bytes=100)
    first, second = kept(10), kept(20)
    buffer.keep(first, now_s=1.0)
    buffer.keep(second, now_s=3.0)

    buffer.prove(5.9)
    before = (buffer.num_bytes, buffer.is_settled)
    buffer.prove(6.0)
    after = (buffer.num_bytes, buffer.is_settled)

    assert (before, after) == ((30, False), (20, False))
    assert buffer.pause_s(6.0) == 2.0
    assert buffer.take() == [second]


def test_beyond_its_bytes_the_oldest_turns_are_forgotten_but_nothing_is_proven() -> None:
    buffer = ResendBuffer(keep_s=5.0, max_bytes=25)
    buffer.keep(kept(10), now_s=1.0)
    newer = kept(20)
    buffer.keep(newer, now_s=2.0)

    assert (buffer.num_bytes, buffer.num_forgotten, buffer.is_settled) == (20, 1, False)
    assert buffer.take() == [newer]


def opening() -> Admission:
    group = GroupOpened(group_id="g", prompt_uid="", num_samples=1)
    return Admission(group, [TrajectoryQueue(QUEUE.key, "g/0/0")], PendingWrite())


def test_a_trajectory_counts_as_opened_while_its_opening_is_kept() -> None:
    buffer = ResendBuffer(keep_s=5.0, max_bytes=25)
    first, again = opening(), opening()
    buffer.keep(first, now_s=1.0)
    buffer.keep(again, now_s=3.0)

    buffer.prove(6.0)
    held = buffer.has_opened(QUEUE.key)
    buffer.prove(8.0)

    assert (held, buffer.has_opened(QUEUE.key)) == (True, False)


def test_failed_or_resent_trajectory_does_not_count_as_opened() -> None:
    buffer = ResendBuffer(keep_s=5.0, max_bytes=25)
    buffer.keep(failed := opening(), now_s=1.0)
    failed.queues[0].error = FencedError("late")
    has_failed = not buffer.has_opened(QUEUE.key)
    buffer.keep(opening(), now_s=1.0)

    buffer.take()

    assert has_failed
    assert not buffer.has_opened(QUEUE.key)


def test_nothing_is_kept_for_a_syncing_store() -> None:
    synced, refused = ResendBuffer(keep_s=5.0, max_bytes=25), ResendBuffer(keep_s=0.0, max_bytes=25)
    synced.is_needed = False
    for buffer in (synced, refused):
        buffer.keep(kept(10), now_s=1.0)

    assert (synced.is_settled, refused.is_settled) == (True, True)
