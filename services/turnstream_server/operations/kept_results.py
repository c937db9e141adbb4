"""Results that are dropped once they were fetched, or after a time without a fetch.

A dropped result leaves a mark, so that its request stays finished and never runs again. Results of
LARGE_BYTES or fewer stay until their session ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast

import redis
import redis.asyncio

from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Command, Script, run_command, run_command_async
from turnstream_server.operations.keys import RESULTS, model_keys, sampler_keys
from turnstream_server.operations.request_ids import RequestId, parse_request_id
from turnstream_server.operations.results import DROPPED

UNFETCHED_S: Final = 3600.0
"""Seconds for which a result without a fetch is kept."""

FETCHED_S: Final = 120.0
"""Seconds for which a result is kept after its first fetch: the answer may be lost."""

LARGE_BYTES: Final = 1 << 10

_MOST: Final = 1_000
"""Results of one read."""

_KEEP: Final = Script("keep_results", "turnstream_server.operations")
_DROP: Final = Script("drop_result", "turnstream_server.operations")


def keep_unfetched(client: redis.Redis, requests: Iterable[tuple[RequestId, bytes]]) -> None:
    """Keep results for UNFETCHED_S from now on; called before they are written."""
    large = [request for request, data in requests if len(data) > LARGE_BYTES]
    if large:
        run_command(client, _kept(UNFETCHED_S, large, keeps_earlier=False))


async def keep_fetched(client: redis.asyncio.Redis, request_id: RequestId, data: bytes) -> None:
    """Keep a result for FETCHED_S after its first fetch."""
    if len(data) > LARGE_BYTES:
        await run_command_async(client, _kept(FETCHED_S, [request_id], keeps_earlier=True))


async def drop_due(client: redis.asyncio.Redis) -> int:
    """Drop the results whose time has expired; return their number."""
    num_dropped = 0
    while found := await _due(client):
        for name in found:
            request_id = parse_request_id(name.decode())
            of_target = sampler_keys if request_id.is_sample else model_keys
            key = of_target(request_id.target).results
            command = _DROP([key], request_id.number, DROPPED)
            num_dropped += await run_command_async(client, command)
        with translating():
            await client.zrem(RESULTS, *found)
    return num_dropped


async def _due(client: redis.asyncio.Redis) -> list[bytes]:
    with translating():
        seconds, _ = cast("tuple[int, int]", await client.time())
        now_ms = seconds * 1000
        return cast(Any, await client.zrangebyscore(RESULTS, 0, now_ms, start=0, num=_MOST))


def _kept(seconds: float, requests: Iterable[RequestId], *, keeps_earlier: bool) -> Command:
    return _KEEP([RESULTS], round(seconds * 1000), int(keeps_earlier), *map(str, requests))
