from __future__ import annotations

from turnstream.errors import FencedError
from turnstream.generator.encode.encoder import TurnRecord
from turnstream.generator.outbox.receipts import PendingWrite
from turnstream.generator.outbox.resend import KeptWrite, ResendBuffer
from turnstream.generator.outbox.writes import Admission, TrajectoryQueue
from turnstream.types import GroupOpened, TrajectoryKey, TurnShape

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
