"""Receipts of writes that the store has not acknowledged yet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final

from turnstream.errors import NotReadyError, TurnstreamError, WaitReason
from turnstream.types import TrajectoryKey
from turnstream.types.scalars import timeout

_MAX_NOTES: Final = 5  # notes on the first error about the others

_new_event = threading.Lock()


class PendingWrite:
    """Counts the unacknowledged parts of a write. Only the outbox settles it.

    Args:
        num_parts: trajectories, or turns, that are each settled once.
        unread_failures: list to which it adds itself if it ends with an error, so that the error is
            raised even if no caller reads it.
        why: returns the reasons why it is not settled.
        check_caller: raises where it can never be settled: in a forked process, or for asyncio in
            another event loop.
    """

    __slots__ = (
        "_check_caller",
        "_errors",
        "_event",
        "_num_open",
        "_unread_failures",
        "_why",
        "was_read",
    )

    def __init__(
        self,
        num_parts: int = 1,
        *,
        unread_failures: list[PendingWrite] | None = None,
        why: Callable[[PendingWrite], Sequence[WaitReason]] = lambda _: (),
        check_caller: Callable[[], None] = lambda: None,
    ) -> None:
        self._num_open = num_parts
        self._errors: dict[TrajectoryKey | None, TurnstreamError] = {}
        self._unread_failures = unread_failures
        self._why = why
        self._check_caller = check_caller
        self._event: Any = None
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
        """Record that one part was acknowledged, or failed for good."""
        self._num_open -= 1
        if error is not None:
            self._errors[key] = error
        if self._num_open == 0:
            if self._errors and self._unread_failures is not None:
                self._unread_failures.append(self)
            if self._event is not None:
                self._event.set()

    def raise_error(self) -> None:
        """Raise the first error, if there is one."""
        self.was_read = True
        for error in self._errors.values():
            raise error

    def _timed_out(self, timeout_s: float | None) -> NotReadyError:
        message = f"the store has not acknowledged it within {timeout_s:g} s"
        return NotReadyError(message, self._why(self))


class Receipt(PendingWrite):
    """Stands for writes that were accepted here and are on their way to the store."""

    __slots__ = ()

    def result(self, timeout_s: float | None = None) -> None:
        """Wait until the store has acknowledged all of it.

        Raises:
            NotReadyError: it was not done within `timeout_s`, with the reason; sending continues.
            RejectedError: this is a process that was forked after the write.
            TurnstreamError: the first error; `errors` has all of them.
        """
        timeout_s = timeout(timeout_s, field="timeout_s")
        if not self.is_done:
            self._check_caller()
            with _new_event:
                self._event = self._event or threading.Event()
            # Another thread may have settled it before it could see the event.
            if not self.is_done and not self._event.wait(timeout_s):
                raise self._timed_out(timeout_s)
        self.raise_error()


class AsyncReceipt(PendingWrite):
    """The same as Receipt, to be awaited in the event loop of its publisher."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:
        return self.result().__await__()

    async def result(self, timeout_s: float | None = None) -> None:
        """Wait like `Receipt.result`."""
        timeout_s = timeout(timeout_s, field="timeout_s")
        if not self.is_done:
            self._check_caller()
            self._event = self._event or asyncio.Event()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
            except TimeoutError as error:
                raise self._timed_out(timeout_s) from error
        self.raise_error()


def raise_unread(failures: list[PendingWrite], losses: list[TurnstreamError]) -> None:
    """Raise the losses and the unread errors as one error, and clear the list."""
    unread = [failed for failed in failures if not failed.was_read]
    failures.clear()
    errors = [*losses, *(error for failed in unread for error in failed.errors.values())]
    if not errors:
        return
    first, *others = dict.fromkeys(errors)
    first.others = tuple(others)
    for other in others[:_MAX_NOTES]:
        first.add_note(f"and {other}")
    if len(others) > _MAX_NOTES:
        first.add_note(f"and {len(others) - _MAX_NOTES} more")
    raise first
