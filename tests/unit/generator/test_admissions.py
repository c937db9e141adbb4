"""Groups that ask for admission, without a store: rounds are taken, and answered by hand."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from testkit.runs.outboxes import OutboxDriver, driver_with_queue
from turnstream.batching.config import BatchingConfig
from turnstream.errors import NotReadyError, WaitKind
from turnstream.generator.outbox.receipts import PendingWrite
from turnstream.generator.outbox.writes import Round, TrajectoryQueue
from turnstream.generator.transport.transport import num_replies
from turnstream.records.configs import encode_config


def waits_reply() -> list[Any]:
    """The state of a paused run without other obstacles."""
    config = encode_config(BatchingConfig(batch_groups=4, mini_batch_groups=4))
    frontier = [b"stepped", b"0", b"live_groups", b"4", b"opened_groups", b"4", b"paused", b"why"]
    leader = [b"owner", b"batcher", b"expires_ms", b"105000"]
    parts: dict[str, Any] = {
        **{key: [] for key in ("budget", "counts", "ranks", "oldest_refills", "leases")},
        **dict.fromkeys(("num_again", "num_refills", "num_leases"), 0),
        "now_ms": b"100000",
        "version_id": b"",
        "config": config,
        "frontier": frontier,
        "leader": leader,
        "last_ids": [b"0-0", b"0-0"],
        "prompts": [None] * 4,
        "server": [0, 0, None],
        "step_times": [None, None],
    }
    return [word for name, part in parts.items() for word in (name.encode(), part)]


def refused(**limits: Any) -> tuple[OutboxDriver, TrajectoryQueue, PendingWrite]:
    """Return an outbox with a group that was refused, and waits for a minute."""
    driver, opened = OutboxDriver(admission_timeout_s=60.0, **limits), PendingWrite()
    (queue,) = driver.request(opened=opened)
    driver.answer(ResponseError("WAIT [7-0] the planner sleeps"))
    return driver, queue, opened


def timed_out() -> tuple[OutboxDriver, TrajectoryQueue, Round]:
    """Return an outbox whose group timed out during its second request, and that request."""
    driver, queue, _ = refused(timeout_s=600.0)
    driver.outbox.admissions.woken()
    asked = driver.take_round()
    driver.now_s += 60.0
    driver.outbox.expire(driver.now_s)
    return driver, queue, asked


def test_refused_group_waits_until_it_is_woken() -> None:
    driver, queue = driver_with_queue()
    opened = PendingWrite()
    (waiting,) = driver.request(opened=opened)
    driver.append(waiting)

    driver.answer(ResponseError("WAIT [7-0] no capacity"))
    driver.request()
    driver.answer(ResponseError("WAIT [9-0] no capacity"))
    driver.append(queue)
    payload = driver.answer(1)
    wake_id, nothing_to_send = driver.outbox.admissions.wake_id, driver.take() is None
    driver.outbox.admissions.woken()
    rounds = [driver.script_names(driver.answer(*answers)) for answers in ([[1], [1]], [1])]

    assert (wake_id, nothing_to_send) == ("7-0", True)  # the listener starts at the oldest id
    assert driver.script_names(payload) == ["append"]
    assert rounds == [["open_group", "open_group"], ["append"]]
    assert opened.is_done
    assert driver.outbox.admissions.wake_id is None
    assert driver.outbox.inflight.statistics().num_waits == 2


def test_admission_wait_ends_by_its_deadline_while_the_store_is_away() -> None:
    driver, _, opened = refused(timeout_s=600.0)

    while not opened.is_done:
        driver.skip_pause()
        if (sent := driver.take()) is not None:
            driver.outbox.lost(sent, error=RedisConnectionError("gone"), now_s=driver.now_s)

    assert driver.now_s == pytest.approx(160.0)
    (error,) = opened.errors.values()
    assert isinstance(error, NotReadyError)
    assert [reason.kind for reason in error.reasons] == [WaitKind.NO_ADMISSION, WaitKind.STORE_AWAY]
    assert error.reasons[0].facts == {"group": "g", "samples": 3, "waited_s": pytest.approx(60.0)}


def test_one_answer_serves_several_refused_groups() -> None:
    driver = OutboxDriver(admission_timeout_s=60.0)
    asked_s = []
    for _ in range(4):
        driver.request()
        driver.answer(ResponseError("WAIT [7-0] no capacity"))
        driver.now_s += 2.0

    while driver.outbox.pause_s(driver.now_s) is not None:
        driver.skip_pause()
        sent = driver.take()
        if sent is not None:
            asked_s.append(driver.now_s)
            driver.answered(sent, [ResponseError("ERR no")])

    assert asked_s == pytest.approx([159.0, 165.0])
    assert driver.now_s == pytest.approx(166.0)


def test_answer_from_before_a_wait_is_not_its_reason() -> None:
    driver = OutboxDriver(admission_timeout_s=60.0)
    opened, later = PendingWrite(), PendingWrite()
    driver.request(opened=opened)
    driver.answer(ResponseError("WAIT [7-0] no capacity"))
    driver.skip_pause()
    driver.answer(waits_reply())
    driver.now_s += 0.5
    driver.request(opened=later)
    driver.answer(ResponseError("WAIT [7-0] no capacity"))

    said = [
        [reason.kind for reason in driver.outbox.why.waiting(driver.now_s + 0.1, delivery)]
        for delivery in (opened, later)
    ]

    assert said == [[WaitKind.NO_ADMISSION, WaitKind.RUN_PAUSED], [WaitKind.NO_ADMISSION]]


def test_group_abandoned_while_it_waits_is_not_requested_again() -> None:
    driver = OutboxDriver()
    queues = driver.request(2)
    driver.answer(ResponseError("WAIT [7-0] no capacity"))
    ends = [PendingWrite(), PendingWrite()]

    for queue, end in zip(queues, ends, strict=True):
        driver.outbox.abandon(queue, "bored", end=end)

    assert [end.is_done for end in ends] == [True, True]
    assert driver.outbox.is_idle


def test_group_abandoned_during_admission_is_abandoned_once_open() -> None:
    driver = OutboxDriver()
    (queue,) = driver.request()
    asking = driver.take_round()
    driver.outbox.abandon(queue, "bored", end=PendingWrite())

    loads = [b"sha"] * (num_replies(asking) - 1)
    driver.answered(asking, [*loads, [1]])

    assert driver.script_names(driver.answer(1)) == ["abandon"]
    assert driver.outbox.is_idle


@pytest.mark.parametrize("answer", [[5], ResponseError("WAIT [8-0] no capacity")])
def test_group_opened_after_its_wait_ended_is_abandoned(answer: Any) -> None:
    driver, queue, asked = timed_out()

    driver.answered(asked, [answer])
    sent = driver.take()

    assert queue.error is not None
    assert driver.outbox.admissions.wake_id is None
    abandons = [] if sent is None else [(c.script.name, *c.args[:3]) for c in sent.commands]
    expected = ("abandon", "g/0/0", "5:w", "its wait for admission had ended")
    assert abandons == ([] if isinstance(answer, ResponseError) else [expected])


def test_group_whose_wait_ended_is_not_requested_after_a_lost_round() -> None:
    driver, _, asked = timed_out()

    driver.outbox.lost(asked, error=RedisConnectionError("gone"), now_s=driver.now_s)
    driver.skip_pause()

    assert driver.take() is None
    assert driver.outbox.is_idle
