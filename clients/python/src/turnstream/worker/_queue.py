"""A queue bounded in bytes between the thread that prefetches and the one that trains."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class ClosedError(Exception):
    """The queue was closed before or during a wait."""


class QueueSize(NamedTuple):
    """Number of complete items, and bytes with those reserved for the next one."""

    num_items: int
    num_bytes: int


class ByteQueue(Generic[Item]):
    """First in, first out. One side reserves bytes and then puts; the other side takes.

    An item larger than the bound enters an empty queue; otherwise it could never enter.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[tuple[Item, int]] = deque()
        self._num_bytes = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()

    def reserve(self, num_bytes: int) -> None:
        """Wait until the queue has capacity for `num_bytes` more; ClosedError once it is closed."""
        with self._changed:
            while not self._closed and self._num_bytes + num_bytes > self._max_bytes:
                if self._num_bytes == 0:
                    break
                self._changed.wait()
            self._raise_if_closed()
            self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Return an unused reservation."""
        with self._changed:
            self._num_bytes -= num_bytes
            self._changed.notify_all()

    def put(self, item: Item, *, num_bytes: int) -> None:
        """Add an item whose bytes were reserved."""
        with self._changed:
            self._items.append((item, num_bytes))
            self._changed.notify_all()

    def fail(self, error: BaseException, *, drops: bool) -> None:
        """Raise the error from `take` after the remaining items; `drops` drops these items."""
        with self._changed:
            self._failure = error
            if drops:
                self._num_bytes -= sum(num_bytes for _, num_bytes in self._items)
                self._items.clear()
            self._changed.notify_all()

    def take(self, *, timeout_s: float, watch: Callable[[], float]) -> Item:
        """Return the oldest item; wait for it at most `timeout_s`.

        `watch` is called before every wait, and returns the seconds until it must run again.

        Raises:
            TimeoutError: no item came.
            ClosedError: the queue was closed.
            BaseException: the error given to `fail`.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._items:
                self._raise_if_closed()
                if self._failure is not None:
                    raise self._failure
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError
                self._changed.wait(max(0.0, min(remaining_s, watch())))
            self._raise_if_closed()
            item, num_bytes = self._items.popleft()
            self._num_bytes -= num_bytes
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Drop all items and wake every waiting thread."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def size(self) -> QueueSize:
        """Return the present size."""
        with self._changed:
            return QueueSize(len(self._items), self._num_bytes)

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ClosedError
