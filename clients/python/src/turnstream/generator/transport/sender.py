"""Carries an outbox to the store with one daemon thread; a second one waits for capacity.

No call of the sender outlasts the time that the store may be away. Requests for admission have
deadlines of their own, which the listener keeps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from redis.exceptions import RedisError

from turnstream.errors import NotReadyError, WaitReason
from turnstream.generator.outbox.calls import Round
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import Delivery, Receipt
from turnstream.generator.transport.base import ASK_AGAIN_S, LISTEN_AGAIN_S, SenderBase
from turnstream.store.client import keys
from turnstream.store.client.connection import Link, connect
from turnstream.store.client.deadlines import ANSWER_S, SOCKET_TIMEOUT_S, ending_within
from turnstream.types import DeclaredColumn

_Result = TypeVar("_Result")
_JOIN_TIMEOUT_S = 5.0


class Sender(SenderBase[None]):
    """Owns the lock, the threads and the connections of one publisher.

    The threads start with the first write and end with `close`.
    """

    def __init__(self, url: str, outbox: Outbox) -> None:
        super().__init__(url, outbox)
        self.lock = threading.Lock()
        self._work = threading.Condition(self.lock)
        self._progress = threading.Condition(self.lock)
        self._refused = threading.Condition(self.lock)
        self._link = Link(url)
        self._wake_client = connect(url, num_retries=0)
        self._sender: threading.Thread | None = None
        self._listener: threading.Thread | None = None
        self._why = lambda delivery: outbox.why.waiting(time.monotonic(), delivery)

    def put(self, write: Callable[[], _Result]) -> _Result:
        """Do something to the outbox, and send what comes of it."""
        with self.lock:
            self._require_open()
            result = write()
            self._sender = self._sender or _started(self._send_rounds, "turnstream-sender")
            self._work.notify()
        return result

    def receipt(
        self, num_parts: int = 1, *, unread_failures: list[Delivery] | None = None
    ) -> Receipt:
        """A receipt that a thread can wait for."""
        return Receipt(self.lock, num_parts, unread_failures=unread_failures, why=self._why)

    def learn_columns(self) -> tuple[DeclaredColumn, ...]:
        """The extra columns of the run, which is asked for them once."""
        while (columns := self._outbox.extra_columns) is None:
            receipt = self.receipt()
            self.put(lambda receipt=receipt: self._outbox.learn_columns(receipt))
            receipt.result()
        return columns

    def require_open(self) -> None:
        """Refuse writes after `close`."""
        with self.lock:
            self._require_open()

    def _wait(
        self,
        is_done: Callable[[], bool],
        timeout_s: float | None,
        message: str,
        reasons: Callable[[float], Sequence[WaitReason]],
    ) -> None:
        with self.lock:
            self._progress.wait_for(lambda: self._is_closed or is_done(), timeout_s)
            if not is_done():
                self._require_open()
                raise NotReadyError(f"{message} {timeout_s:g} s", reasons(time.monotonic()))

    def close(self) -> None:
        """Fail unacknowledged writes, stop the threads, disconnect. Safe to repeat."""
        with self.lock:
            self._end("the publisher was closed")
            for condition in (self._work, self._progress, self._refused):
                condition.notify_all()
        self._link.close()
        self._wake_client.connection_pool.disconnect()
        for thread in (self._sender, self._listener):
            if thread is not None:
                thread.join(_JOIN_TIMEOUT_S)
        self._link.close()  # it may have been connecting when it was closed first
        self._wake_client.close()

    def _send_rounds(self) -> None:
        try:
            while (sent := self._next_round()) is not None:
                self._exchange(sent)
        except Exception as error:  # noqa: BLE001 - it is logged, and ends every write
            with self.lock:
                self._end_failed(error)
                self._progress.notify_all()

    def _next_round(self) -> Round | None:
        """Return the next round to send; None after the publisher was closed."""
        with self.lock:
            while not self._is_closed:
                sent = self._outbox.next_round(time.monotonic())
                if sent is not None:
                    return sent
                self._progress.notify_all()  # groups may have waited too long, and are turned away
                self._work.wait(self._outbox.wakes_in_s(time.monotonic()))
        return None

    def _exchange(self, sent: Round) -> None:
        try:
            with self.lock:
                left_s = self._outbox.outage.left_s(time.monotonic())
            timeout_s = SOCKET_TIMEOUT_S if left_s is None else min(SOCKET_TIMEOUT_S, left_s)
            replies = self._link.exchange(sent.pack(), sent.num_replies, timeout_s=timeout_s)
        except (RedisError, OSError) as error:
            with self.lock:
                self._outbox.lost(sent, error=error, now_s=time.monotonic())
        else:
            with self.lock:
                self._outbox.answered(sent, replies=replies, now_s=time.monotonic())
        with self.lock:
            self._progress.notify_all()
            if self._must_listen:
                self._listener = self._listener or _started(self._listen, "turnstream-listener")
                self._refused.notify()

    def _listen(self) -> None:
        """Wait on the run's wake stream while refused requests wait."""
        while (wake_id := self._next_wake_id()) is not None:
            with self.lock:
                ends_in_s = self._expire()
            block_s = ASK_AGAIN_S if ends_in_s is None else min(ASK_AGAIN_S, ends_in_s)
            has_moved = self._has_moved(wake_id, block_s=block_s)
            with self.lock:
                self._expire()
                if has_moved is None:
                    self._refused.wait_for(lambda: self._is_closed, LISTEN_AGAIN_S)
                if has_moved is not False or block_s == ASK_AGAIN_S:
                    self._outbox.woken()
                    self._work.notify()

    def _next_wake_id(self) -> str | None:
        with self.lock:
            while not self._is_closed and self._outbox.wake_id is None:
                self._refused.wait(self._expire())
            return None if self._is_closed else self._outbox.wake_id

    def _has_moved(self, wake_id: str, *, block_s: float) -> bool | None:
        """Return whether the wake stream moved within `block_s`; None if it was not read."""
        block_ms = max(1, int(block_s * 1000))
        wake = keys.run_keys(self._outbox.run).wake
        try:
            with ending_within(block_s + ANSWER_S):
                return bool(self._wake_client.xread({wake: wake_id}, block=block_ms))
        except (RedisError, OSError):
            return None

    def _expire(self) -> float | None:
        """Fail requests past their deadline; return the seconds until the next one.

        The listener calls it, under the lock: a silent store may block the sender.
        """
        now_s = time.monotonic()
        if self._outbox.ends_in_s(now_s) == 0:
            self._outbox.expire(now_s)
            self._progress.notify_all()
        return self._outbox.ends_in_s(now_s)


def _started(target: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread
