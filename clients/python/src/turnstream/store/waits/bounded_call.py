"""A wait for the store in several calls: the deadline of each, and why one had no answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

import redis

from turnstream.errors import (
    StoreFullError,
    StoreUnavailableError,
    UnavailableError,
    WaitReason,
)
from turnstream.store.client.connection import MAX_BLOCK_S, limited_client
from turnstream.store.client.deadlines import ANSWER_S, is_silence
from turnstream.store.client.replies import translating
from turnstream.store.waits.awaited import not_ready, store_away, store_full
from turnstream.store.waits.read_waits import read_waits
from turnstream.store.waits.wait_snapshot import WaitSnapshot

_LEAST_S: Final = 0.001  # a socket with a timeout of 0 would not wait at all


class StoreWait:
    """A wait for the store in several calls, with one deadline.

    A call that was sent before it has ANSWER_S more for its answer. `awaited` names the thing
    for programs, as "task", and `what` for people.
    """

    def __init__(
        self,
        address: str,
        awaited: str | None,
        what: str,
        *,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._awaited = awaited
        self._what = what
        self.wait_s = wait_s
        self._clock = clock
        self._since_s = clock()
        self._last_answer: tuple[str, float] | None = None

    @property
    def message(self) -> str:
        """Return that the wait has timed out, in words."""
        return f"{self._what} within {self.wait_s:g} s"

    @property
    def has_timed_out(self) -> bool:
        """Whether the deadline has passed."""
        return self._left_s <= 0

    @property
    def block_ms(self) -> int:
        """Milliseconds for which the next blocking read may wait; at least one."""
        return max(1, int(min(MAX_BLOCK_S, self._left_s) * 1000))

    def note_answer(self, why: str) -> None:
        """Record why the store has not granted the awaited thing."""
        self._last_answer = why, self._clock()

    @contextlib.contextmanager
    def bounded(self, client: redis.Redis) -> Iterator[redis.Redis]:
        """Yield a client for one call that ends by the deadline, with the reasons in the error."""
        with self.answering() as left_s, limited_client(client, timeout_s=left_s) as limited:
            yield limited

    @contextlib.contextmanager
    def answering(self) -> Iterator[float]:
        """Yield the seconds that one call may take; its error has the reasons."""
        sent_s = self._clock()
        try:
            with translating():
                yield max(_LEAST_S, self._last_s - sent_s)
        except (StoreFullError, StoreUnavailableError) as error:
            raise self._unanswered(error, sent_s) from error

    @contextlib.asynccontextmanager
    async def bounded_async(self) -> AsyncIterator[None]:
        """End the calls inside by the deadline, with the reasons in the error."""
        sent_s = self._clock()
        try:
            with translating():
                async with asyncio.timeout(self._last_s - sent_s):
                    yield
        except (StoreFullError, StoreUnavailableError) as error:
            raise self._unanswered(error, sent_s) from error

    def read_waits(self, client: redis.Redis, run: str) -> WaitSnapshot | None:
        """Return the state of the run; None if the store does not return it in time."""
        left_s = max(_LEAST_S, self._last_s - self._clock())
        with limited_client(client, timeout_s=left_s) as limited:
            return read_waits(limited, run)

    @property
    def _left_s(self) -> float:
        return self._since_s + self.wait_s - self._clock()

    @property
    def _last_s(self) -> float:
        """Until when a call may wait for its answer."""
        return self._since_s + self.wait_s + ANSWER_S

    def _unanswered(
        self, error: StoreFullError | StoreUnavailableError, sent_s: float
    ) -> UnavailableError:
        """Return the error of a call without an answer, with the last answer before it."""
        now_s = self._clock()
        reasons = [unanswered(error, address=self._address, since_s=now_s - sent_s)]
        message = f"{self._what}: {reasons[0].sentence}"
        if self._awaited is not None:
            why, told_s = "the store has said nothing of it", None
            if self._last_answer is not None:
                told_s = now_s - self._last_answer[1]
                why = f"the store said {told_s:.1f} s ago: {self._last_answer[0]}"
            waited_s = now_s - self._since_s
            reasons.insert(0, not_ready(self._awaited, why, waited_s=waited_s, told_s=told_s))
        return type(error)(message, reasons, error.retry_after_s if self._left_s > 0 else None)


def unanswered(
    error: StoreFullError | StoreUnavailableError, *, address: str, since_s: float
) -> WaitReason:
    """Return why a call that was sent `since_s` ago had no answer."""
    if isinstance(error, StoreFullError):
        return store_full(None, address=address, since_s=since_s)
    is_silent = error.__cause__ is not None and is_silence(error.__cause__)
    return store_away(address=address, since_s=since_s, why=None if is_silent else str(error))
