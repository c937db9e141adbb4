"""Leases of open trajectories, without a store: renewed, lost, and judged by their end."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from testkit.runs.outboxes import OutboxDriver, driver_with_queue
from turnstream.errors import FencedError, RunNotFoundError
from turnstream.generator.outbox.heartbeats import Heartbeats
from turnstream.generator.outbox.writes import TargetRun, TrajectoryQueue
from turnstream.generator.transport.transport import parse_replies
from turnstream.types import TrajectoryKey


def heartbeats() -> Heartbeats:
    return Heartbeats(TargetRun("r"), "w", lambda _, __: None)


def test_leases_are_renewed_every_third_of_the_length_that_the_store_names() -> None:
    driver = OutboxDriver()
    queues = driver.open_queues(2)

    sent: list[tuple[float, Any]] = []
    for _ in range(3):
        driver.skip_pause()
        (beat,) = driver.answer([30_000, b"OK", b"OK"]).commands
        sent.append((round(driver.now_s - 100.0, 3), (beat.script.name, *beat.args)))

    both = ("heartbeat", "g/0/0", "1:w", "g/1/0", "1:w")
    assert sent == [(0.1, both), (10.1, both), (20.1, both)]
    assert [queue.error for queue in queues] == [None, None]


def test_new_trajectory_reads_the_lease_length_soon() -> None:
    # The leases of the run had become shorter, and the next trajectory was abandoned.
    beats = heartbeats()
    first, second = (
        TrajectoryQueue(TrajectoryKey("g", sample), f"g/{sample}/0", epoch=1) for sample in range(2)
    )
    beats.opened(first, now_s=0.0)
    beats.take(0.1)
    beats.answered(lease_s=30.0, sent_s=0.1)
    beats.ended(first)

    beats.opened(second, now_s=1000.0)
    before = beats.pause_s(1000.0)
    beats.take(1000.1)
    beats.answered(lease_s=0.6, sent_s=1000.1)

    assert before == pytest.approx(0.1)
    assert beats.pause_s(1000.1) == pytest.approx(0.2)


def test_leases_are_renewed_beside_a_long_round() -> None:
    driver, queue = driver_with_queue()
    driver.skip_pause()
    driver.answer([30_000, b"OK"])
    waiting = driver.append(queue)
    alone = driver.outbox.next_beats(driver.now_s + 10.0)
    on_its_way = driver.take_round()

    for state, lost in ((b"OK", False), (b"FENCED [abandoned] g/0/0 is abandoned", True)):
        driver.now_s += 15.0
        beside = driver.outbox.next_beats(driver.now_s)
        assert beside is not None
        driver.outbox.beats_answered(parse_replies(beside, [[30_000, state]]), sent_s=driver.now_s)
        assert driver.outbox.tracker.heartbeats.has_slept(driver.now_s + 1.0) is lost
    driver.answered(on_its_way, [1])

    assert alone is None
    assert waiting.is_done
    driver.append(queue)  # not sent before the heartbeats that were refused
    assert driver.script_names(driver.take_round()) == ["heartbeat"]


def test_refused_beat_beside_a_round_changes_nothing() -> None:
    driver, queue = driver_with_queue()
    driver.append(queue)
    driver.take_round()
    driver.now_s += 1.0

    beside = driver.outbox.next_beats(driver.now_s)
    assert beside is not None
    refused = [ResponseError("NOSCRIPT none of that name")]
    driver.outbox.beats_answered(parse_replies(beside, refused), sent_s=driver.now_s)

    assert queue.error is None
    assert driver.outbox.next_beats(driver.now_s + 1.0) is not None


def test_a_publisher_with_nothing_open_sends_no_heartbeat() -> None:
    driver, queue = driver_with_queue()
    driver.append(queue)
    driver.seal(queue)
    driver.answer(2)
    driver.answer([b"OK"])

    driver.now_s += 1000

    assert driver.take() is None
    assert driver.outbox.pause_s(driver.now_s) is None


def test_lost_heartbeat_is_repeated_after_the_pause() -> None:
    driver = OutboxDriver()
    driver.open_queues()
    driver.skip_pause()

    lost = driver.take_round()
    was_idle = driver.outbox.is_idle  # it does not delay a flush
    driver.outbox.lost(lost, error=RedisConnectionError("gone"), now_s=driver.now_s)
    was_paused = driver.take() is None
    driver.skip_pause()
    again = driver.answer([30_000, b"OK"])

    assert (was_idle, was_paused) == (True, True)
    assert driver.script_names(again) == ["heartbeat"]
    assert driver.take() is None


def test_refused_heartbeat_of_a_deleted_run_fails_its_trajectories() -> None:
    # A generator that plays on for hours must not write into another run of the same name.
    driver = OutboxDriver()
    one, ending = driver.open_queues(2)
    driver.append(ending)
    driver.seal(ending)
    driver.skip_pause()

    driver.answer(2, ResponseError("NORUN no such run"))

    with pytest.raises(RunNotFoundError):
        driver.append(one)
    assert ending.error is None  # its seal is on its way, and is answered by itself
    assert driver.outbox.tracker.heartbeats.num_open == 1


def test_trajectory_found_lost_by_a_turn_is_not_lost_twice() -> None:
    driver, queue = driver_with_queue()
    driver.skip_pause()
    waiting = driver.append(queue)

    driver.answer(
        ResponseError("FENCED epoch 2 writes, not 1"),
        [30_000, b"FENCED [abandoned] g/0/0 is abandoned: why"],
    )

    with pytest.raises(FencedError, match="epoch 2 writes"):
        waiting.raise_error()
    with pytest.raises(FencedError, match="epoch 2 writes"):
        driver.append(queue)


def test_ending_trajectory_ignores_a_fenced_heartbeat() -> None:
    # The planner found the seal and posted it, before this publisher could: to the heartbeat, the
    # trajectory is not open any more.
    driver, queue = driver_with_queue()
    driver.append(queue)
    end = driver.seal(queue)
    driver.now_s += 1.0

    driver.answer(2, [30_000, b"FENCED [sealed] g/0/0 is sealed: 1"])
    was_done = end.is_done
    driver.answer([b"DUPLICATE"])

    assert (was_done, end.is_done) == (False, True)
    assert not end.errors


def test_more_leases_than_one_call_takes_travel_in_several() -> None:
    beats = heartbeats()
    key = TrajectoryKey("g", 0)
    queues = [TrajectoryQueue(key, f"{n}", epoch=1) for n in range(600)]
    for queue in queues:
        beats.opened(queue, now_s=0.0)

    names = [call.request.command.args[::2] for call in beats.take(1.0)]

    assert [len(each) for each in names] == [256, 256, 88]
    assert [name for each in names for name in each] == [queue.trajectory_id for queue in queues]


def slept(driver: OutboxDriver, *, lease_s: float) -> None:
    """Its lease is known; then nothing happens for longer than that."""
    driver.skip_pause()
    driver.answer([round(lease_s * 1000), b"OK"])
    driver.now_s += lease_s + 0.1


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    ("state", "why"),
    [("unknown", "was never opened, or is released"), ("abandoned", "is abandoned: it was silent")],
)
def test_publisher_renews_its_leases_first_after_a_sleep(state: str, why: str, ends: bool) -> None:
    # The trajectory was released so long ago that no script refused its turn. The turn created its
    # payload again, which was never released.
    driver, queue = driver_with_queue()
    slept(driver, lease_s=30.0)

    waiting = driver.append(queue)
    if ends:
        driver.seal(queue)
    asked = driver.answer([30_000, f"FENCED [{state}] g/0/0 {why}".encode()])

    assert driver.script_names(asked) == ["heartbeat"]
    with pytest.raises(FencedError, match=why):
        waiting.raise_error()
    assert driver.take() is None


def test_sleeper_renews_first_and_continues_if_it_lost_nothing() -> None:
    # It slept while the answer was on its way: a late answer proves nothing.
    driver, queue = driver_with_queue()
    driver.skip_pause()
    sent = driver.take_round()
    driver.now_s += 100.0
    driver.answered(sent, [[30_000, b"OK"]])

    waiting = driver.append(queue)
    rounds = [driver.script_names(driver.answer(*answers)) for answers in ([[30_000, b"OK"]], [1])]

    assert rounds == [["heartbeat"], ["append"]]
    assert not waiting.errors


def test_ending_trajectory_ignores_a_heartbeat_after_its_release() -> None:
    # All of it may have been stored, and trained, before the answer was lost.
    driver = OutboxDriver()
    queue = driver.open_with_turn()
    slept(driver, lease_s=30.0)
    driver.append(queue, "C")
    end = driver.seal(queue)

    driver.answer([30_000, b"FENCED [unknown] g/0/0 was never opened, or is released"])

    assert queue.error is None
    assert not end.errors
    assert driver.script_names(driver.answer(0)) == ["append"]
