"""A gateway in a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Self

from turnstream_server.gateway.config import GatewayOptions
from turnstream_server.gateway.service import serving


class GatewayThread:
    """A gateway on the store at `url`; `address` is its "host:port".

    Args:
        url: address of the store.
        options: fields of `GatewayOptions`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url
        self._options = {"poll_s": 10.0, "shutdown_grace_s": 1.0, **options}
        self.address = "127.0.0.1:0"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._may_end: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def base_url(self) -> str:
        """Return the address for a client."""
        return f"http://{self.address}"

    @property
    def num_requests(self) -> int:
        """Return the number of requests in progress."""
        assert self._loop is not None
        tasks = asyncio.all_tasks(self._loop)
        return sum("run_asgi" in repr(each.get_coro()) for each in tasks)

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
        options = GatewayOptions(redis_url=self._url, listen=self.address, **self._options)
        async with serving(options) as self.address:
            is_ready.set()
            await self._may_end.wait()
