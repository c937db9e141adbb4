"""Receipts of writes that the store has not acknowledged yet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from turnstream.errors import NotReadyError, TurnstreamError, WaitReason
from turnstream.types import TrajectoryKey
from turnstream.types.scalars import timeout


class Delivery:
    """Counts the unacknowledged parts of a write. Only the outbox settles it.

    Args:
        num_parts: trajectories, or turns, that are each settled once.
        unread_failures: list to which it adds itself if it ends with an error, so that the error is
            raised even if no caller reads it.
    """

    __slots__ = ("_errors", "_num_open", "_unread_failures", "was_read")

    def __init__(
        self, num_parts: int = 1, *, unread_failures: list[Delivery] | None = None
    ) -> None:
        self._num_open = num_parts
        self._errors: dict[TrajectoryKey | None, TurnstreamError] = {}
        self._unread_failures = unread_failures
        self.was_read = False

    @property
    def is_done(self) -> bool:
        """Whether the store acknowledged all of it, or some of it failed for good."""
        return self._num_open == 0

    @property
    def errors(self) -> Mapping[TrajectoryKey | None, TurnstreamError]:
        """Return the errors so far by trajectory."""
        return dict(self._errors)

    def settle(self, key: TrajectoryKey | None, error: TurnstreamError | None = None) -> None:
        """One part arrived, or failed for good."""
        self._num_open -= 1
        if error is not None:
            self._errors[key] = error
        if self._num_open == 0:
            if self._errors and self._unread_failures is not None:
                self._unread_failures.append(self)
            self._wake_waiters()

    def raise_error(self) -> None:
        """Raise the first error, if there is one."""
        self.was_read = True
        for error in self._errors.values():
            raise error

    def _wake_waiters(self) -> None:
        """Told once, when the last part was settled."""


Why = Callable[[Delivery], Sequence[WaitReason]]
"""Says what a delivery waits for."""


def _unknown(_: Delivery) -> Sequence[WaitReason]:
    return ()


class Receipt(Delivery):
    """Stands for writes that were accepted here and are on their way to the store."""

    __slots__ = ("_event", "_lock", "_why")

    def __init__(
        self,
        lock: threading.Lock,
        num_parts: int = 1,
        *,
        unread_failures: list[Delivery] | None = None,
        why: Why = _unknown,
    ) -> None:
        super().__init__(num_parts, unread_failures=unread_failures)
        self._lock = lock  # the outbox settles under this lock, and is asked under it
        self._why = why
        self._event: threading.Event | None = None

    def result(self, timeout_s: float | None = None) -> None:
        """Wait until the store has acknowledged all of it.

        Raises:
            NotReadyError: it was not done within `timeout_s`, with the reason; sending continues.
            TurnstreamError: the first error; `errors` has all of them.
        """
        timeout_s = timeout(timeout_s, field="timeout_s")
        with self._lock:
            if not self.is_done and self._event is None:
                self._event = threading.Event()
        if not self.is_done and self._event is not None and not self._event.wait(timeout_s):
            with self._lock:
                reasons = self._why(self)
            message = f"the store has not acknowledged it within {timeout_s:g} s"
            raise NotReadyError(message, reasons)
        self.raise_error()

    def _wake_waiters(self) -> None:
        if self._event is not None:
            self._event.set()


class AsyncReceipt(Delivery):
    """The same as Receipt, to be awaited in the event loop of its publisher."""

    __slots__ = ("_event", "_why")

    def __init__(
        self,
        num_parts: int = 1,
        *,
        unread_failures: list[Delivery] | None = None,
        why: Why = _unknown,
    ) -> None:
        super().__init__(num_parts, unread_failures=unread_failures)
        self._why = why
        self._event: asyncio.Event | None = None

    def __await__(self) -> Generator[Any, None, None]:
        return self.result().__await__()

    async def result(self, timeout_s: float | None = None) -> None:
        """Wait until the store has acknowledged all of it.

        Raises:
            NotReadyError: it was not done within `timeout_s`, with the reason; sending continues.
            TurnstreamError: the first error; `errors` has all of them.
        """
        timeout_s = timeout(timeout_s, field="timeout_s")
        if not self.is_done:
            self._event = self._event or asyncio.Event()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
            except TimeoutError as error:
                message = f"the store has not acknowledged it within {timeout_s:g} s"
                raise NotReadyError(message, self._why(self)) from error
        self.raise_error()

    def _wake_waiters(self) -> None:
        if self._event is not None:
            self._event.set()
