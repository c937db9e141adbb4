"""The client of the store of a gateway, which shares few connections."""

from __future__ import annotations

import asyncio

from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.state import bounded_client


async def test_bounded_client_lends_the_connection_unused_longest(server: EmbeddedServer) -> None:
    async with bounded_client(server.url, max_connections=3) as client:
        await asyncio.gather(*(client.client_id() for _ in range(3)))

        ids = [await client.client_id() for _ in range(6)]

    assert len({*ids}) == 3
    assert ids[:3] == ids[3:]
