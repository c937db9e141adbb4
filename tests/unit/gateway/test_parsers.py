"""Where bodies are parsed, and the turns of the owners of keys."""

from __future__ import annotations

import asyncio
import functools
import os
import signal

import pytest

from turnstream.errors import InvalidTurnError, UnavailableError
from turnstream_server.gateway.parsers import (
    IN_LOOP_BYTES,
    IN_THREAD_JSON_BYTES,
    FairPlaces,
    Parsers,
)

_SMALL, _LARGE = bytes(IN_LOOP_BYTES), bytes(IN_THREAD_JSON_BYTES + 1)


def _pid(body: bytes) -> tuple[int, int]:
    return len(body), os.getpid()


def _end(number: int, _: bytes) -> None:
    os.kill(os.getpid(), number)


def _refuse(_: bytes) -> None:
    raise InvalidTurnError("logprobs", "are wrong")


async def test_large_json_is_parsed_in_a_process_that_is_replaced() -> None:
    parsers = Parsers()
    try:
        small = await parsers.run(_pid, _SMALL, owner="a", is_json=True)
        no_json = await parsers.run(_pid, _LARGE, owner="a")
        first, second = [await parsers.run(_pid, _LARGE, owner="a", is_json=True) for _ in "12"]
        with pytest.raises(InvalidTurnError, match="logprobs: are wrong"):
            await parsers.run(_refuse, _LARGE, owner="a", is_json=True)
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


async def test_owner_with_a_queue_leaves_a_place_for_others() -> None:
    places = FairPlaces(2)
    order: list[str] = []

    async def work(name: str) -> None:
        async with places.place(name[0]):
            order.append(name)
            await asyncio.sleep(0)

    waiting = [asyncio.create_task(work(f"a{number}")) for number in range(4)]
    waiting.append(asyncio.create_task(work("b0")))
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.wait(waiting)

    assert order == ["a0", "b0", "a2", "a3"]
