"""Scripts whose keys are keys of one run."""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio

from turnstream.store.client import keys
from turnstream.store.client.scripts import (
    Argument,
    Command,
    Script,
    run_command,
    run_command_async,
)


class RunScript:
    """A script in a package of the ledger, and its keys by their names in RunKeys."""

    def __init__(self, name: str, package: str, key_names: str) -> None:
        self.name = name
        self._script = Script(name, f"turnstream_server.ledger.{package}")
        self._key_names = key_names.split()

    def __call__(self, run: str, *args: Argument) -> Command:
        """Return the call of this script for a run; nothing is sent."""
        names = keys.run_keys(run)
        return self._script([getattr(names, each) for each in self._key_names], *args)

    def call(self, client: redis.Redis, run: str, *args: Argument) -> Any:
        """Call this script and return its reply."""
        return run_command(client, self(run, *args))

    async def call_async(self, client: redis.asyncio.Redis, run: str, *args: Argument) -> Any:
        """Call this script and return its reply."""
        return await run_command_async(client, self(run, *args))
