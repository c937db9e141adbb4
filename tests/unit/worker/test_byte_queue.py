from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from turnstream.worker._queue import ByteQueue, ClosedError


def filled(*items: str, max_bytes: int = 100) -> ByteQueue[str]:
    queue: ByteQueue[str] = ByteQueue(max_bytes=max_bytes)
    for item in items:
        queue.reserve(len(item))
        queue.put(item)
    return queue


def test_reservation_waits_for_capacity() -> None:
    queue = filled("aaaa", max_bytes=6)
    reserved = threading.Event()
    thread = threading.Thread(target=lambda: (queue.reserve(3), reserved.set()), daemon=True)
    thread.start()

    assert not reserved.wait(0.05)
    queue.take(timeout_s=30)

    assert reserved.wait(30)
    assert queue.num_bytes == 3
    queue.release()
    assert queue.num_bytes == 0


def test_item_larger_than_the_bound_enters_an_empty_queue() -> None:
    queue = filled(max_bytes=2)

    queue.reserve(10)

    assert queue.num_bytes == 10


def test_take_raises_a_timeout_error() -> None:
    with pytest.raises(TimeoutError):
        filled().take(timeout_s=0.01)


def test_remaining_items_come_before_the_failure() -> None:
    queue = filled("a")
    queue.fail(ValueError("no more"), drops=False)

    assert queue.take(timeout_s=30) == "a"
    for _ in range(2):
        with pytest.raises(ValueError, match="no more"):
            queue.take(timeout_s=30)


@pytest.mark.parametrize(
    ("queue", "wait"),
    [
        (filled("aa", max_bytes=2), lambda queue: queue.reserve(2)),
        (filled(), lambda queue: queue.take(timeout_s=30)),
    ],
    ids=["reserve", "take"],
)
def test_close_wakes_a_waiting_thread(
    queue: ByteQueue[str], wait: Callable[[ByteQueue[str]], object]
) -> None:
    timer = threading.Timer(0.05, queue.close)
    timer.start()

    with pytest.raises(ClosedError):
        wait(queue)
    timer.join()
