"""Sends an outbox to the store with one task; a second task listens while groups wait.

The listener and its connection live from the first refusal to `close`. They never end between two
waits, so that no refusal can fall into a gap.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, NoReturn, TypeVar

from redis.exceptions import RedisError

from turnstream.errors import (
    NotReadyError,
    RejectedError,
    StoreUnavailableError,
    TurnstreamError,
    WaitReason,
)
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import AsyncReceipt, PendingWrite
from turnstream.generator.outbox.writes import Round
from turnstream.generator.requests import AwaitWake
from turnstream.generator.transport.transport import Link, Transport
from turnstream.store.client.cancellation import cancel_all, to_the_end
from turnstream.store.client.connection import OwnProcess
from turnstream.store.client.deadlines import ANSWER_S, SOCKET_TIMEOUT_S
from turnstream.types import DeclaredColumn

ASK_AGAIN_S: Final = 5.0
"""A waiting group asks again after this time, even if its run's wake stream says nothing: it may
wait for memory of the server, which another run may have freed."""

_LISTEN_AGAIN_S: Final = 0.5
_LEAST_PAUSE_S: Final = 0.1
"""Pause between two heartbeats at least: a third of the shortest lease."""

_REMEDY: Final = "pass the run to the other process, and call run.publisher() there"

_logger = logging.getLogger(__name__)

_Receipt = TypeVar("_Receipt", bound=PendingWrite)
_Result = TypeVar("_Result")


class Alarm:
    """A timer that stays set from round to round; its function sets it again if it is early."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._timer: asyncio.TimerHandle | None = None
        self._when_s = 0.0

    def ring_in(self, pause_s: float) -> None:
        """Call the function after this time at the latest."""
        loop = asyncio.get_running_loop()
        when_s = loop.time() + pause_s
        if self._timer is None or when_s < self._when_s:
            self.cancel()
            self._when_s = when_s
            self._timer = loop.call_at(when_s, self._ring)

    def cancel(self) -> None:
        """Call nothing. Safe to repeat."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._call()


class Sender(Generic[_Receipt]):
    """Owns the tasks and the connections of one publisher, which live in one event loop.

    The transport is closed with the sender. Callers get receipts of `receipt_kind`. The lock is
    held during every use of the outbox.
    """

    def __init__(self, transport: Transport, outbox: Outbox, receipt_kind: type[_Receipt]) -> None:
        self.lock = threading.Lock()
        self.process = OwnProcess("a publisher", remedy=_REMEDY)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport = transport
        self._outbox = outbox
        self._receipt_kind = receipt_kind
        self._is_closed = False
        self._work = asyncio.Event()
        self._progress = asyncio.Event()
        self._refused = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._deadline = Alarm(self._keep_deadlines)
        self._beats = Alarm(self._renew_beside)
        self._learning: AsyncReceipt | None = None

    def check_caller(self) -> None:
        """Raise RejectedError in a forked process, or outside the event loop of the first call."""
        self.process.require()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if self._loop is None:
            self._loop = loop
        if loop is None or loop is not self._loop:
            raise RejectedError(
                "an async publisher was used outside the event loop of its first call: make one "
                "with run.async_publisher() in each event loop"
            )

    def put(self, write: Callable[[], _Result]) -> _Result:
        """Return the result of a change of the outbox, and send its calls."""
        self.check_caller()
        with self.lock:
            self._require_open()
            result = write()
            has_round = self._outbox.has_round
        if not has_round:  # else the task looks for more calls after the round
            self._wake()
        return result

    def receipt(
        self, num_parts: int = 1, *, unread_failures: list[PendingWrite] | None = None
    ) -> _Receipt:
        """Return a receipt for the user."""
        return self._receipt_kind(
            num_parts,
            unread_failures=unread_failures,
            why=self._why,
            check_caller=self.check_caller,
        )

    def loop_receipt(self) -> AsyncReceipt:
        """Return a receipt that can be awaited in the event loop."""
        return AsyncReceipt(why=self._why, check_caller=self.check_caller)

    def require_open(self) -> None:
        """Refuse writes after `close`, and from callers that it does not serve."""
        self.check_caller()
        with self.lock:
            self._require_open()

    async def learn_columns(self) -> tuple[DeclaredColumn, ...]:
        """Return the extra columns of the run, which is asked for them once."""
        self.check_caller()
        while (columns := self._outbox.run_calls.extra_columns) is None:
            if self._learning is None or self._learning.is_done:
                receipt = self._learning = self.loop_receipt()
                self.put(lambda receipt=receipt: self._outbox.run_calls.learn_columns(receipt))
            await self._learning
        return columns

    async def wait_for_capacity(
        self, has_capacity: Callable[[], bool], *, timeout_s: float
    ) -> None:
        """Wait until more may be accepted."""
        message = "no capacity for more unacknowledged writes (max_inflight_bytes) within"
        await self._wait(has_capacity, timeout_s, message, self._outbox.why.no_space)

    async def flush(self, timeout_s: float | None) -> None:
        """Wait until everything accepted is acknowledged or has failed."""
        message = "writes are not acknowledged after"
        await self._wait(lambda: self._outbox.is_idle, timeout_s, message, self._outbox.why.waiting)

    async def flush_to_disk(self, timeout_s: float | None) -> None:
        """Wait for `flush`, and until the store has had the time to sync."""
        message = "writes may not be on disk after"
        outbox = self._outbox

        def is_on_disk() -> bool:
            return outbox.is_on_disk and not self._is_closed

        await self._wait(is_on_disk, timeout_s, message, outbox.why.not_on_disk)

    async def close(self) -> None:
        """Fail unacknowledged writes, stop the tasks, disconnect. Safe to repeat."""
        self._end("the publisher was closed")
        for alarm in (self._deadline, self._beats):
            alarm.cancel()
        await cancel_all([task for task in (self._sending, self._listening) if task is not None])
        # The traceback of a task names this sender: the cycle would keep its records in memory.
        self._sending = self._listening = None
        await self._transport.close()

    def __reduce__(self) -> NoReturn:
        self.process.refuse_pickle()

    def _wake(self) -> None:
        """Look for calls to send, in the event loop."""
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_rounds(), name="turnstream-sender")
            atexit.register(self._close_at_exit, self._sending)
        self._work.set()

    def _why(self, delivery: PendingWrite) -> Sequence[WaitReason]:
        with self.lock:
            return self._outbox.why.waiting(time.monotonic(), delivery)

    async def _wait(
        self,
        is_done: Callable[[], bool],
        timeout_s: float | None,
        message: str,
        reasons: Callable[[float], Sequence[WaitReason]],
    ) -> None:
        """Wait until `is_done`; NotReadyError has the reasons at the end of the time."""
        self.check_caller()
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_true(is_done):
                    await self._progress.wait()
        except TimeoutError as error:
            with self.lock:
                why = reasons(time.monotonic())
            raise NotReadyError(f"{message} {timeout_s:g} s", why) from error

    def _is_true(self, is_done: Callable[[], bool]) -> bool:
        with self.lock:
            if is_done():
                return True
            self._require_open()
            return False

    def _require_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailableError("the publisher was closed")

    def _end(self, reason: str) -> None:
        with self.lock:
            self._is_closed = True
            self._outbox.close(StoreUnavailableError(reason))
        self._notify_waiters()

    async def _send_rounds(self) -> None:
        link = self._transport.link()
        try:
            while not self._is_closed:
                await self._exchange(link, await self._next_round())
        except Exception as error:
            _logger.exception("the sender of a publisher failed")
            self._end(f"the sender failed: {error!r}")
        finally:
            atexit.unregister(self._close_at_exit)
            if not self._is_closed:
                self._warn_unclosed()
            await link.close()

    def _close_at_exit(self, sending: asyncio.Task[None]) -> None:
        """Cancel the task in a loop that the program has left without an end.

        A pending task prints an error when the interpreter deletes it. LoopThread ends its own.
        """
        loop = sending.get_loop()
        if self.process.is_here and not loop.is_running() and not loop.is_closed():
            tasks = [task for task in (sending, self._listening) if task is not None]
            loop.run_until_complete(cancel_all(tasks))

    def _warn_unclosed(self) -> None:
        with self.lock:
            num_bytes = self._outbox.statistics().inflight_bytes
        _logger.warning(
            "run %s: publisher %s was never closed: %d bytes of its writes are not acknowledged. "
            "Use it in a `with` block, or call close()",
            *(self._outbox.run, self._outbox.writer, num_bytes),
        )

    async def _next_round(self) -> Round:
        while True:
            self._work.clear()
            with self.lock:
                sent = self._outbox.next_round(time.monotonic())
                wakes_in_s = self._outbox.wakes_in_s(time.monotonic())
            if sent is not None:
                return sent
            self._notify_waiters()  # waits may have timed out
            timer = None
            if wakes_in_s is not None:
                timer = asyncio.get_running_loop().call_later(wakes_in_s, self._work.set)
            try:
                await self._work.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    async def _exchange(self, link: Link, sent: Round) -> None:
        self._keep_deadlines()
        self._renew_beside()
        try:
            answers = await link.exchange(sent, timeout_s=self._silent_s(), on_sent=self._on_sent)
        except (RedisError, OSError) as error:
            with self.lock:
                self._outbox.lost(sent, error=error, now_s=time.monotonic())
        else:
            with self.lock:
                self._outbox.answered(sent, answers, now_s=time.monotonic())
        finally:
            if self._renewing is not None:
                renewing, self._renewing = self._renewing, None
                await cancel_all([renewing])
        self._notify_waiters()
        if self._outbox.admissions.wake_id is not None:
            self._refused.set()
            if self._listening is None:
                self._listening = asyncio.create_task(self._listen(), name="turnstream-listener")

    def _renew_beside(self) -> None:
        """Send heartbeats that get due during a round over a connection of their own.

        Nothing else fits on the connection of the round: over a slow link, a large turn takes
        longer than a lease lasts.
        """
        with self.lock:
            now_s = time.monotonic()
            due_s = self._outbox.tracker.heartbeats.pause_s(now_s)
            if due_s is None or not self._outbox.has_round:  # nothing is open
                return
            pause_s = max(due_s, self._outbox.outage.sent_s + _LEAST_PAUSE_S - now_s)
        if pause_s > 0:
            self._beats.ring_in(pause_s)
        elif self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(), name="turnstream-heartbeats")

    async def _renew(self) -> None:
        """Send heartbeats whenever they are due, while a trajectory is open."""
        link, outbox = self._transport.link(), self._outbox
        try:
            while True:
                with self.lock:
                    sent_s = time.monotonic()
                    sent = outbox.next_beats(sent_s)
                if sent is not None:
                    with contextlib.suppress(RedisError, OSError):
                        answers = await link.exchange(sent)
                        with self.lock:
                            outbox.beats_answered(answers, sent_s=sent_s)
                with self.lock:
                    pause_s = outbox.tracker.heartbeats.pause_s(time.monotonic())
                if pause_s is None:
                    return
                await asyncio.sleep(max(pause_s, _LEAST_PAUSE_S))
        finally:
            await to_the_end(link.close())

    def _silent_s(self) -> float:
        """Return how long the store may take no byte and send no answer."""
        left_s = self._outbox.outage.left_s(time.monotonic())
        return SOCKET_TIMEOUT_S if left_s is None else min(SOCKET_TIMEOUT_S, left_s)

    def _on_sent(self) -> float:
        """Record that bytes of the round were sent; return how long the store may be silent now."""
        with self.lock:
            self._outbox.outage.progress_s = time.monotonic()
        return self._silent_s()

    def _keep_deadlines(self) -> None:
        with self.lock:
            now_s = time.monotonic()
            has_ended = self._outbox.ends_in_s(now_s) == 0
            if has_ended:
                self._outbox.expire(now_s)
            ends_in_s = self._outbox.ends_in_s(now_s)
        if has_ended:
            self._notify_waiters()
        if ends_in_s is not None:
            self._deadline.ring_in(ends_in_s)

    def _notify_waiters(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    async def _listen(self) -> None:
        """Wait on the run's wake stream whenever groups wait for admission."""
        while True:
            wake_id = await self._next_wake_id()
            try:
                async with asyncio.timeout(ASK_AGAIN_S + ANSWER_S):
                    wake = AwaitWake(self._outbox.run, wake_id, int(ASK_AGAIN_S * 1000))
                    await self._transport.reply(wake)
            except (RedisError, OSError, TurnstreamError):
                await asyncio.sleep(_LISTEN_AGAIN_S)
            with self.lock:
                self._outbox.admissions.woken()  # whether it has moved or not
            self._work.set()

    async def _next_wake_id(self) -> str:
        """Return the id from which to read the wake stream, once a group waits for admission."""
        while (wake_id := self._outbox.admissions.wake_id) is None:
            self._refused.clear()
            await self._refused.wait()
        return wake_id
