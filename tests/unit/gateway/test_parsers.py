"""Where bodies are parsed, places of requests before any route, and turns of owners."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from starlette.types import Message, Receive, Scope, Send

from testkit import wait_until
from turnstream.errors import InvalidTurnError, RecordError, UnavailableError
from turnstream_server.gateway.admission import LimitedApp
from turnstream_server.gateway.bodies import (
    IN_LOOP_BYTES,
    IN_THREAD_JSON_BYTES,
    MAX_BRACKETS,
    MAX_JSON_BYTES,
    MAX_QUOTES,
    Parsers,
)
from turnstream_server.gateway.config import GatewayOptions
from turnstream_server.gateway.polls import Polls
from turnstream_server.gateway.state import Gateway, StoreThreads

_SMALL, _LARGE = bytes(IN_LOOP_BYTES), bytes(IN_THREAD_JSON_BYTES + 1)


def _pid(body: bytes) -> tuple[int, int]:
    return len(body), os.getpid()


def _end(number: int, _: bytes) -> None:
    os.kill(os.getpid(), number)


def _wait_for(path: Path, _: bytes) -> None:
    wait_until(path.exists)


def _refuse(_: bytes) -> None:
    raise InvalidTurnError("logprobs", "are wrong")


@pytest.fixture(autouse=True)
def importable_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes import the functions of this file."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3])


async def test_large_json_is_parsed_in_a_process_that_is_replaced() -> None:
    parsers = Parsers()
    try:
        small = await parsers.run(_pid, _SMALL, owner="a", is_json=True)
        no_json = await parsers.run(_pid, _LARGE, owner="a")
        first, second = [await parsers.run(_pid, _LARGE, owner="a", is_json=True) for _ in "12"]
        with pytest.raises(InvalidTurnError, match="logprobs: are wrong"):
            await parsers.run(_refuse, _LARGE, owner="a", is_json=True)
        interrupt = functools.partial(_end, signal.SIGINT)  # Ctrl-C reaches a whole terminal
        await parsers.run(interrupt, _LARGE, owner="a", is_json=True)
        kill = functools.partial(_end, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="has ended"):
            await parsers.run(kill, _LARGE, owner="a", is_json=True)
        third = await parsers.run(_pid, _LARGE, owner="a", is_json=True)
    finally:
        await parsers.close()

    own = os.getpid()
    assert (small, no_json) == ((len(_SMALL), own), (len(_LARGE), own))
    assert first == second == (len(_LARGE), first[1])
    assert len({own, first[1], third[1]}) == 3


async def test_json_of_many_parts_is_refused_before_it_is_parsed() -> None:
    parsers = Parsers()
    try:
        for body, message in (
            (b"[" * MAX_BRACKETS + b"{", f"{MAX_BRACKETS + 1} brackets, more than {MAX_BRACKETS}"),
            (b'"' * (MAX_QUOTES + 1), f"{MAX_QUOTES + 1} quotation marks, more than {MAX_QUOTES}"),
            (b" " * (MAX_JSON_BYTES + 1), f"{MAX_JSON_BYTES + 1} bytes of JSON, more than"),
        ):
            with pytest.raises(RecordError, match=message):
                await parsers.run(_refuse, body, owner="a", is_json=True)
    finally:
        await parsers.close()


async def test_owner_with_a_queue_leaves_a_thread_and_a_process(tmp_path: Path) -> None:
    parsers, ends, end = Parsers(), threading.Event(), tmp_path / "end"
    wait = functools.partial(_wait_for, end)
    calls: list[Coroutine[Any, Any, object]] = [
        *(parsers.in_thread(ends.wait, owner="a") for _ in range(4)),
        *(parsers.run(wait, _LARGE, owner="a", is_json=True) for _ in range(2)),
    ]
    own = [asyncio.create_task(each) for each in calls]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            in_thread = await parsers.in_thread(os.getpid, owner="b")
            _, in_process = await parsers.run(_pid, _LARGE, owner="b", is_json=True)
        num_done = sum(each.done() for each in own)
    finally:
        ends.set()
        end.touch()
        await asyncio.gather(*own)
        await parsers.close()

    assert num_done == 0
    assert in_thread == os.getpid() != in_process


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
