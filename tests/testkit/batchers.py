"""A batcher in a thread of its own, for tests whose client blocks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Self

from turnstream_server.batcher.serving.service import BatcherOptions, serving


class BatcherThread:
    """A batcher replica on the store at `url`; `target` is its address.

    Args:
        url: address of the store.
        options: fields of `BatcherOptions`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url
        self._options = {"shutdown_grace_s": 0.1, **options}
        self.target = "127.0.0.1:0"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._may_end: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serve, at the same address as before, if any."""
        is_ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(is_ready)), daemon=True
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

    async def _serve(self, is_ready: threading.Event) -> None:
        self._loop, self._may_end = asyncio.get_running_loop(), asyncio.Event()
        options = BatcherOptions(redis_url=self._url, listen=self.target, **self._options)
        async with serving(options) as self.target:
            is_ready.set()
            await self._may_end.wait()
