"""Clients that write to one server instance only.

A restarted store may have lost its last writes, a leader's lease among them, and may grant the same
epoch to another owner. So an epoch is valid only together with the server instance that granted it.
A leader writes through a client whose connections all lead to that instance.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Self

import redis.asyncio

from turnstream.errors import FencedError
from turnstream.store.client.cancellation import to_the_end
from turnstream.store.client.connection import connect_async

_RUN_ID = re.compile(rb"\brun_id:(\w+)")


class PinnedClient:
    """A client that refuses another server instance; a context manager.

    The first connection determines the instance. A later connection to another one raises
    FencedError before anything is sent, also when the client repeats a call.
    """

    def __init__(self, url: str) -> None:
        self.run_id = ""
        self.client: redis.asyncio.Redis = connect_async(url)
        options = self.client.connection_pool.connection_kwargs
        self._check: Callable[[Any], Awaitable[None]] | None = options.get("redis_connect_func")
        options["redis_connect_func"] = self._meet

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await to_the_end(self.client.aclose())

    async def _meet(self, connection: Any) -> None:
        await (connection.on_connect() if self._check is None else self._check(connection))
        await connection.send_command("INFO", "server", check_health=False)
        answer: bytes = await connection.read_response()
        found = _RUN_ID.search(answer)
        run_id = found[1].decode() if found else ""
        if self.run_id and run_id != self.run_id:
            await connection.disconnect()
            raise FencedError(
                f"the store was restarted: it is {run_id[:8]}, no longer {self.run_id[:8]}"
            )
        self.run_id = run_id
