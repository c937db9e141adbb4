"""A sender for threads, and its event loop in a daemon thread, which runs coroutines for others."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from turnstream.errors import RejectedError, StoreUnavailableError
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import Receipt
from turnstream.generator.transport.sender import Sender
from turnstream.generator.transport.transport import Transport

_JOIN_TIMEOUT_S = 5.0

_Result = TypeVar("_Result")


class LoopThread:
    """The event loop of one publisher for threads. It starts with the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.is_closed = False

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of a coroutine, which ends if the caller is interrupted."""
        with self._lock:
            if self.is_closed:
                coroutine.close()
                raise StoreUnavailableError("the publisher was closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._started())
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise StoreUnavailableError("the publisher was closed") from error
        except BaseException:
            future.cancel()
            raise

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call a function in the loop; does nothing after `close`."""
        with self._lock:
            if not self.is_closed:
                self._started().call_soon_threadsafe(callback)

    def close(self) -> None:
        """Cancel what still runs, and end the thread. Safe to repeat."""
        atexit.unregister(self._close_at_exit)
        with self._lock:
            self.is_closed = True
            if self._loop is not None and self._thread is not None and self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not None:
            self._thread.join(_JOIN_TIMEOUT_S)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            is_ready = threading.Event()
            self._thread = threading.Thread(
                target=self._serve, args=(is_ready,), name="turnstream-publisher", daemon=True
            )
            self._thread.start()
            atexit.register(self._close_at_exit)
            is_ready.wait()
        assert self._loop is not None
        return self._loop

    def _serve(self, is_ready: threading.Event) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            is_ready.set()
            self._loop.run_forever()

    def _close_at_exit(self) -> None:
        """Cancel the tasks of a publisher that was never closed, unless this is a forked process.

        A loop that ends with the interpreter prints an error for each pending task.
        """
        if self._thread is not None and self._thread.is_alive():
            self.close()


class ThreadSender(Sender[Receipt]):
    """A sender for threads: its tasks run in the event loop of a daemon thread."""

    def __init__(self, transport: Transport, outbox: Outbox) -> None:
        super().__init__(transport, outbox, Receipt)
        self.thread = LoopThread()
        self._is_woken = False

    def check_caller(self) -> None:
        """Raise RejectedError in a forked process. Any thread may call it."""
        self.process.require()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of a coroutine that runs in the event loop."""
        try:
            self.check_caller()
        except RejectedError:
            coroutine.close()
            raise
        return self.thread.run(coroutine)

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self.thread.call_soon(self._wake_in_loop)

    def _wake_in_loop(self) -> None:
        self._is_woken = False
        super()._wake()
