"""Places of requests, before any route."""

from __future__ import annotations

import asyncio
from typing import Any

import redis.asyncio
from starlette.types import Message, Receive, Scope, Send

from turnstream_server.commands.waiting import ResultWaiter
from turnstream_server.gateway.config import GatewayOptions
from turnstream_server.gateway.key_limits import LimitedApp
from turnstream_server.gateway.polls import Polls
from turnstream_server.gateway.state import Gateway

_URL = "redis://127.0.0.1:1"  # no request reaches the store
_HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]


async def test_request_whose_body_no_route_reads_takes_a_place() -> None:
    client, ends, running = redis.asyncio.Redis.from_url(_URL), asyncio.Event(), set[str]()
    gateway = Gateway(
        GatewayOptions(redis_url=_URL),
        client,
        Polls(client, ResultWaiter(client, client), hold_s=0),
    )

    async def route(scope: Scope, _: Receive, send: Send) -> None:
        running.add(scope["path"])
        await ends.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    app = LimitedApp(route, gateway)

    async def request(number: int, length: bytes) -> int:
        statuses: list[int] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": bytes(int(length))}

        async def send(message: Message) -> None:
            statuses.append(message.get("status", 0))

        headers = [*_HEADERS, (b"content-length", length)]
        scope: dict[str, Any] = {"type": "http", "path": f"/{number}", "headers": headers}
        await app(scope, receive, send)
        return statuses[0]

    tasks = [asyncio.create_task(request(number, b"2")) for number in range(40)]
    tasks += [asyncio.create_task(request(number, b"100000")) for number in range(40, 80)]
    for _ in range(20):
        await asyncio.sleep(0)
    num_running = len(running)
    ends.set()
    statuses = await asyncio.gather(*tasks)
    await gateway.resources.aclose()
    await client.aclose()

    assert num_running == 16 + 4
    assert set(statuses) == {204}
