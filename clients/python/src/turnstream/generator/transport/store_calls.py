"""Calls of the store in one wait, each of which ends by the deadline of the wait."""

from __future__ import annotations

from typing import Any

import redis.asyncio

from turnstream.store.client import keys
from turnstream.store.client.scripts import Argument, Command, run_command_async
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.store.waits.wait_snapshot import WaitSnapshot


class StoreCalls:
    """The calls of one wait.

    Args:
        client: client of the store.
        wait: the wait, which names the awaited thing in errors.
    """

    def __init__(self, client: redis.asyncio.Redis, wait: StoreWait) -> None:
        self._client = client
        self.wait = wait

    async def run(self, command: Command) -> Any:
        """Return the reply of a script."""
        async with self.wait.bounded_async():
            return await run_command_async(self._client, command)

    async def execute(self, *words: Argument) -> Any:
        """Return the reply of a command of the store."""
        async with self.wait.bounded_async():
            return await self._client.execute_command(*words)

    async def wait_until_woken(self, run: str, wake_id: str) -> None:
        """Wait until the run's wake stream is beyond this id, or for `block_ms` of the wait."""
        wake = keys.run_keys(run).wake
        await self.execute("XREAD", "BLOCK", self.wait.block_ms, "STREAMS", wake, wake_id)

    async def read_waits(self, run: str) -> WaitSnapshot | None:
        """Return the state of the run; None if the store does not return it in time."""
        return await self.wait.read_waits_async(self._client, run)
