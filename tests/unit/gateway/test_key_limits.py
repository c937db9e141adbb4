"""Places of requests before any route, and turns of owners."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import redis.asyncio
from starlette.types import Message, Receive, Scope, Send

from turnstream_server.gateway.admission import LimitedApp
from turnstream_server.gateway.config import GatewayOptions
from turnstream_server.gateway.polls import Polls
from turnstream_server.gateway.state import Gateway, StoreThreads

_URL = "redis://127.0.0.1:1"  # no request reaches the store
_HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]


async def test_request_whose_body_no_route_reads_takes_a_place() -> None:
    client, ends, running = redis.asyncio.Redis.from_url(_URL), asyncio.Event(), set[str]()
    gateway = Gateway(GatewayOptions(redis_url=_URL), client, Polls(client, client))

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


async def test_owners_take_turns_for_work_that_needs_much_memory() -> None:
    threads, ends, order = StoreThreads(_URL), threading.Event(), list[str]()

    def work(name: str) -> None:
        order.append(name)
        assert ends.wait(60)

    names = ["a0", "a1", "a2", "b0"]
    tasks = [
        asyncio.create_task(threads.run_heavy(lambda name=name: work(name), owner=name[0]))
        for name in names
    ]
    await asyncio.sleep(0)
    ends.set()
    await asyncio.gather(*tasks)
    await threads.close()

    assert order == ["a0", "b0", "a1", "a2"]
