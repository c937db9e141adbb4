"""Clients that speak to one start of the store and to no other.

A store that was started anew may have lost its last writes, leaderships among them, and give the
same epoch to another owner. So an epoch counts together with the start of the store that gave it:
whoever writes with one does so through a client whose connections all lead there.
"""

from __future__ import annotations

import re
from typing import Any, Self

import redis.asyncio

from turnstream.errors import FencedError
from turnstream.store.client.cancellation import to_the_end
from turnstream.store.client.connection import connect_async

_RUN_ID = re.compile(rb"\brun_id:(\w+)")


class BoundStore:
    """A client that refuses to go on with another start of the server; a context manager.

    The first connection says which start it is. A later one that finds another raises FencedError
    from whatever was asked, before it is sent, also where the client repeats what a lost connection
    had not answered.

    Args:
        url: of the store.

    Attributes:
        client: to be used while it lasts.
        run_id: of the server's start; empty before the first connection.
    """

    def __init__(self, url: str) -> None:
        self.run_id = ""
        self.client: redis.asyncio.Redis = connect_async(url)
        self.client.connection_pool.connection_kwargs["redis_connect_func"] = self._meet

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await to_the_end(self.client.aclose())

    async def _meet(self, connection: Any) -> None:
        await connection.on_connect()
        await connection.send_command("INFO", "server", check_health=False)
        answer: bytes = await connection.read_response()
        found = _RUN_ID.search(answer)
        run_id = found[1].decode() if found else ""
        if self.run_id and run_id != self.run_id:
            await connection.disconnect()
            raise FencedError(
                f"the store was started anew: it is {run_id[:8]}, no longer {self.run_id[:8]}"
            )
        self.run_id = run_id
