"""A batcher in a thread of its own, for tests whose client blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from turnstream_server.batcher.serving.service import BatcherOptions, serving


class ServiceThread:
    """A service at `address`, "host:port", which stays the same when it starts again."""

    def __init__(self, serve: Callable[[str], AbstractAsyncContextManager[str]]) -> None:
        self._serve = serve
        self.address = "127.0.0.1:0"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._may_end: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serve, at the same address as before, if any."""
        is_ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(is_ready)), daemon=True
        )
        self._thread.start()
        assert is_ready.wait(60)

    def stop(self) -> None:
        """Stop, as SIGTERM does."""
        if self._thread is None or self._loop is None or self._may_end is None:
            return
        self._loop.call_soon_threadsafe(self._may_end.set)
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    async def _run(self, is_ready: threading.Event) -> None:
        self._loop, self._may_end = asyncio.get_running_loop(), asyncio.Event()
        async with self._serve(self.address) as self.address:
            is_ready.set()
            await self._may_end.wait()


class BatcherThread(ServiceThread):
    """A batcher replica on the store at `url`; `options` are fields of `BatcherOptions`."""

    def __init__(self, url: str, **options: Any) -> None:
        options = {"shutdown_grace_s": 0.1, **options}
        super().__init__(
            lambda listen: serving(BatcherOptions(redis_url=url, listen=listen, **options))
        )

    @property
    def target(self) -> str:
        """Return the address for workers."""
        return self.address
