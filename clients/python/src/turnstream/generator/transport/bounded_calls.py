"""Calls of the store in one wait, each of which ends by the deadline of the wait."""

from __future__ import annotations

import contextlib
from typing import Any

from turnstream.errors import TurnstreamError
from turnstream.generator.requests import ReadTurns, ReadWaits, ScriptRequest
from turnstream.generator.transport.transport import StoredTurns, StoreRequests
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.store.waits.read_waits import parse_waits
from turnstream.store.waits.wait_snapshot import WaitSnapshot


class BoundedCalls:
    """The calls of one wait.

    Args:
        requests: the way to the store.
        wait: the wait, which names the awaited thing in errors.
    """

    def __init__(self, requests: StoreRequests, wait: StoreWait) -> None:
        self._requests = requests
        self.wait = wait

    async def reply(self, request: ScriptRequest) -> Any:
        """Return the reply of the script of a request."""
        async with self.wait.bounded_async():
            return await self._requests.reply(request)

    async def find_run(self, name: str) -> str:
        """Return the id of the run that has this name now."""
        async with self.wait.bounded_async():
            return await self._requests.find_run(name)

    async def read_turns(self, run: str, trajectory_id: str) -> StoredTurns:
        """Return the stored records of a trajectory."""
        async with self.wait.bounded_async():
            return await self._requests.read_turns(ReadTurns(run, trajectory_id))

    async def wait_until_woken(self, run: str, wake_id: str) -> None:
        """Wait until the run's wake stream is beyond this id, or for `block_ms` of the wait."""
        timeout_s = self.wait.block_ms / 1000
        async with self.wait.bounded_async():
            await self._requests.wait_until_woken(run, wake_id, timeout_s=timeout_s)

    async def read_waits(self, run: str) -> WaitSnapshot | None:
        """Return the state of the run; None if the store does not return it in time."""
        with contextlib.suppress(TurnstreamError):
            async with self.wait.bounded_async():
                return parse_waits(run, await self._requests.reply(ReadWaits(run)))
        return None
