from __future__ import annotations

import threading
import time

import pytest

import testkit
from turnstream.worker._queue import ByteQueue, ClosedError


def forever() -> float:
    return 60.0


def take(queue: ByteQueue[str], timeout_s: float = 30.0) -> str:
    return queue.take(timeout_s=timeout_s, watch=forever)


def filled(*items: str, max_bytes: int = 100) -> ByteQueue[str]:
    queue: ByteQueue[str] = ByteQueue(max_bytes=max_bytes)
    for item in items:
        queue.reserve(len(item))
        queue.put(item, num_bytes=len(item))
    return queue


def test_reservation_waits_for_capacity() -> None:
    queue = filled("aaaa", max_bytes=6)
    reserved = threading.Event()
    thread = threading.Thread(target=lambda: (queue.reserve(3), reserved.set()), daemon=True)
    thread.start()

    assert not reserved.wait(0.05)
    take(queue)

    assert reserved.wait(30)
    assert queue.size().num_bytes == 3
    thread.join()


def test_item_larger_than_the_bound_enters_an_empty_queue() -> None:
    queue = filled(max_bytes=2)

    queue.reserve(10)

    assert queue.size().num_bytes == 10


def test_take_raises_a_timeout_error() -> None:
    with pytest.raises(TimeoutError):
        take(filled(), timeout_s=0.01)


def test_remaining_items_come_before_the_failure() -> None:
    queue = filled("a")
    queue.fail(ValueError("no more"), drops=False)

    assert take(queue) == "a"
    for _ in range(2):
        with pytest.raises(ValueError, match="no more"):
            take(queue)


def test_close_wakes_both_sides() -> None:
    full, empty = filled("aa", max_bytes=2), filled()
    failures: list[BaseException] = []

    def run(wait: object, *arguments: object) -> None:
        try:
            wait(*arguments)  # type: ignore[operator]
        except ClosedError as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(full.reserve, 2), daemon=True),
        threading.Thread(target=run, args=(take, empty), daemon=True),
    ]
    for thread in threads:
        thread.start()
    for queue in (full, empty):
        queue.close()
    for thread in threads:
        thread.join(30)

    assert len(failures) == 2


def test_watch_is_called_at_its_own_interval() -> None:
    queue = filled()
    calls_s: list[float] = []

    def watch() -> float:
        calls_s.append(time.monotonic())
        if len(calls_s) == 5:
            queue.close()
        return 0.01

    with pytest.raises(ClosedError):
        queue.take(timeout_s=60.0, watch=watch)

    assert len(calls_s) == 5
    assert calls_s[-1] - calls_s[0] >= 3 * 0.01
    testkit.wait_until(lambda: queue.size().num_items == 0)
