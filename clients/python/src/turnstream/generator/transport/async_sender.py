"""Sends an outbox to the store with one task; a second task listens while groups wait.

The listener and its connection live from the first refusal to `close`. They never end between two
waits, so that no refusal can fall into a gap.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from redis.exceptions import RedisError

from turnstream.errors import NotReadyError, WaitReason
from turnstream.generator.outbox.calls import Round
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import AsyncReceipt, Delivery
from turnstream.generator.transport.base import ASK_AGAIN_S, LISTEN_AGAIN_S, SenderBase
from turnstream.store.client import keys
from turnstream.store.client.cancellation import cancel_all, to_the_end
from turnstream.store.client.connection import AsyncLink, connect_async
from turnstream.store.client.deadlines import ANSWER_S
from turnstream.types import DeclaredColumn

_Result = TypeVar("_Result")


class AsyncSender(SenderBase[Coroutine[Any, Any, None]]):
    """Owns the tasks and the connections of one asyncio publisher; lives in one event loop."""

    def __init__(self, url: str, outbox: Outbox) -> None:
        super().__init__(url, outbox)
        self._work = asyncio.Event()
        self._progress = asyncio.Event()
        self._refused = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._why = lambda delivery: outbox.why.waiting(time.monotonic(), delivery)

    def put(self, write: Callable[[], _Result]) -> _Result:
        """Do something to the outbox, and send what comes of it."""
        self.require_open()
        result = write()
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_rounds(), name="turnstream-sender")
        self._work.set()
        return result

    def receipt(
        self, num_parts: int = 1, *, unread_failures: list[Delivery] | None = None
    ) -> AsyncReceipt:
        """A receipt that can be awaited."""
        return AsyncReceipt(num_parts, unread_failures=unread_failures, why=self._why)

    def require_open(self) -> None:
        """Refuse writes after `close`."""
        self._require_open()

    async def learn_columns(self) -> tuple[DeclaredColumn, ...]:
        """The extra columns of the run, which is asked for them once."""
        while (columns := self._outbox.extra_columns) is None:
            receipt = self.receipt()
            self.put(lambda receipt=receipt: self._outbox.learn_columns(receipt))
            await receipt
        return columns

    async def _wait(
        self,
        is_done: Callable[[], bool],
        timeout_s: float | None,
        message: str,
        reasons: Callable[[float], Sequence[WaitReason]],
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not is_done():
                    self._require_open()
                    await self._progress.wait()
        except TimeoutError as error:
            message = f"{message} {timeout_s:g} s"
            raise NotReadyError(message, reasons(time.monotonic())) from error

    async def close(self) -> None:
        """Fail unacknowledged writes, stop the tasks, disconnect. Safe to repeat."""
        self._end("the publisher was closed")
        self._tell_progress()
        await cancel_all([task for task in (self._sender, self._listener) if task is not None])

    async def _send_rounds(self) -> None:
        link = AsyncLink(self._url)
        try:
            while not self._is_closed:
                await self._exchange(link, await self._next_round())
        except Exception as error:  # noqa: BLE001 - it is logged, and ends every write
            self._end_failed(error)
            self._tell_progress()
        finally:
            await link.close()

    async def _next_round(self) -> Round:
        """The next round to send, once there is one."""
        while True:
            self._work.clear()
            sent = self._outbox.next_round(time.monotonic())
            if sent is not None:
                return sent
            self._tell_progress()  # groups may have waited too long, and are turned away
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._outbox.wakes_in_s(time.monotonic())):
                    await self._work.wait()

    async def _exchange(self, link: AsyncLink, sent: Round) -> None:
        self._keep_time()
        try:
            async with asyncio.timeout(self._outbox.outage.left_s(time.monotonic())):
                replies = await link.exchange(sent.pack(), sent.num_replies)
        except (RedisError, OSError) as error:
            self._outbox.lost(sent, error=error, now_s=time.monotonic())
        else:
            self._outbox.answered(sent, replies=replies, now_s=time.monotonic())
        finally:
            self._leave_time()
        self._tell_progress()
        if self._must_listen:
            self._refused.set()
            if self._listener is None:
                self._listener = asyncio.create_task(self._listen(), name="turnstream-listener")

    def _keep_time(self) -> None:
        """End what has waited long enough, while the task that sends waits for a silent store."""
        now_s = time.monotonic()
        if self._outbox.ends_in_s(now_s) == 0:
            self._outbox.expire(now_s)
            self._tell_progress()
        ends_in_s = self._outbox.ends_in_s(now_s)
        if ends_in_s is not None:
            self._timer = asyncio.get_running_loop().call_later(ends_in_s, self._keep_time)

    def _leave_time(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell_progress(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    async def _listen(self) -> None:
        """Wait on the run's wake stream whenever groups wait for admission."""
        client = connect_async(self._url, num_retries=0)
        try:
            while True:
                wake_id = await self._next_wake_id()
                try:
                    async with asyncio.timeout(ASK_AGAIN_S + ANSWER_S):
                        block_ms = int(ASK_AGAIN_S * 1000)
                        wake = keys.run_keys(self._outbox.run).wake
                        await client.xread({wake: wake_id}, block=block_ms)
                except (RedisError, OSError):
                    await asyncio.sleep(LISTEN_AGAIN_S)
                self._outbox.woken()  # whether it has moved or not
                self._work.set()
        finally:
            await to_the_end(client.aclose())

    async def _next_wake_id(self) -> str:
        """Return the id from which to read the wake stream, once a group waits for admission."""
        while (wake_id := self._outbox.wake_id) is None:
            self._refused.clear()
            await self._refused.wait()
        return wake_id
