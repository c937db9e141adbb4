"""A queue bounded in bytes between the thread that prefetches and the one that trains."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ClosedError(Exception):
    """The queue was closed before or during a wait."""


class ByteQueue(Generic[Item]):
    """First in, first out. One thread reserves bytes and then puts; another thread takes.

    An item larger than the bound enters an empty queue; otherwise it could never enter.

    Attributes:
        num_bytes: bytes of the items and of the reservation.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._items: deque[tuple[Item, int]] = deque()
        self._num_reserved = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    def reserve(self, num_bytes: int) -> None:
        """Wait for the capacity of the next item; ClosedError once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_capacity(num_bytes))
            self._raise_if_closed()
            self._num_reserved = num_bytes
            self.num_bytes += num_bytes

    def release(self) -> None:
        """Return an unused reservation."""
        with self._changed:
            self.num_bytes -= self._num_reserved
            self._num_reserved = 0

    def put(self, item: Item) -> None:
        """Add the item whose bytes were reserved."""
        with self._changed:
            self._items.append((item, self._num_reserved))
            self._num_reserved = 0
            self._changed.notify_all()

    def fail(self, error: BaseException, *, drops: bool) -> None:
        """Raise this in every `take`, after the present items or in place of them (`drops`)."""
        with self._changed:
            self._failure = error
            if drops:
                self.num_bytes -= sum(num_bytes for _, num_bytes in self._items)
                self._items.clear()
            self._changed.notify_all()

    def take(self, *, timeout_s: float) -> Item:
        """Return the oldest item; raise the error of `fail`, or TimeoutError after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._items or self._closed or self._failure, timeout=timeout_s
            )
            self._raise_if_closed()
            if self._items:
                item, num_bytes = self._items.popleft()
                self.num_bytes -= num_bytes
                self._changed.notify_all()
                return item
            raise self._failure or TimeoutError

    def close(self) -> None:
        """Drop all items and wake every waiting thread."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def _has_capacity(self, num_bytes: int) -> bool:
        return self.num_bytes == 0 or self.num_bytes + num_bytes <= self.max_bytes

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ClosedError
