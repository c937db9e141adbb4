"""A gateway in a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
from typing import Any

from testkit.services.batchers import ServiceThread
from turnstream_server.gateway.config import GatewayOptions
from turnstream_server.gateway.service import serving


class GatewayThread(ServiceThread):
    """A gateway on the store at `url`; `options` are fields of `GatewayOptions`."""

    def __init__(self, url: str, **options: Any) -> None:
        options = {"poll_s": 10.0, "shutdown_grace_s": 1.0, **options}
        super().__init__(
            lambda listen: serving(GatewayOptions(redis_url=url, listen=listen, **options))
        )

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
