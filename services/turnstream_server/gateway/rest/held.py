"""Requests that are held until the store has what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, Final, TypeVar

from fastapi import HTTPException, Request
from pydantic import Field

from turnstream.generator import requests
from turnstream.generator.transport.transport import BoundedCalls, RedisRequests
from turnstream.store.client import keys
from turnstream.store.client.cancellation import cancel_all
from turnstream.store.client.connection import address_of_client
from turnstream.store.waits.bounded_call import StoreWait
from turnstream_server.gateway.state import Gateway

MAX_WAIT_S: Final = 60.0
"""Longest wait of one request: proxies end longer ones."""

WaitSeconds = Annotated[
    float,
    Field(
        ge=0,
        le=MAX_WAIT_S,
        allow_inf_nan=False,
        description="Longest wait of the request; 0 returns at once.",
        examples=[20],
    ),
]

_Result = TypeVar("_Result")


class HeldRequests(RedisRequests):
    """The calls of a held request. While it waits it holds no connection of the client."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.client)
        self._streams = gateway.streams

    async def reply(self, request: requests.Request) -> Any:
        """Return the reply to a request."""
        if not isinstance(request, requests.AwaitWake):
            return await super().reply(request)
        wake = {keys.run_keys(request.run).wake: request.wake_id}
        return await self._streams.wait(wake, timeout_s=request.timeout_ms / 1000)


def held_calls(gateway: Gateway, awaited: str, what: str, *, wait_s: float) -> BoundedCalls:
    """Return the calls of a wait; `what` names the awaited thing, as in "run 'maze': no task"."""
    clock = asyncio.get_running_loop().time
    address = address_of_client(gateway.client)
    wait = StoreWait(address, awaited, what, wait_s=wait_s, clock=clock)
    return BoundedCalls(HeldRequests(gateway), wait)


async def while_connected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of some work; HTTPException if the client disconnects, which cancels it.

    The body of the request must have been read.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        await cancel_all([working, leaving])
    raise HTTPException(503, "the client has disconnected")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
