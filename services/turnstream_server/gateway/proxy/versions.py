"""The newest announced version of the weights of each run, at most a second old."""

from __future__ import annotations

import asyncio
from typing import Final

from turnstream.store.run.runs import newest_version
from turnstream_server.gateway.state import StoreThreads

_FRESH_S: Final = 1.0
_MAX_KNOWN: Final = 4_096


class NewestVersions:
    """Reads versions of the runs that are asked for."""

    def __init__(self, threads: StoreThreads) -> None:
        self._threads = threads
        self._known: dict[str, tuple[float, int | None]] = {}

    async def newest(self, run: str) -> int | None:
        """Return the newest version of a run; None if none was announced."""
        now_s = asyncio.get_running_loop().time()
        read_s, version = self._known.get(run, (-_FRESH_S, None))
        if now_s - read_s < _FRESH_S:
            return version
        announced = await self._threads.run(lambda client: newest_version(client, run))
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        version = None if announced is None else announced.version
        self._known[run] = now_s, version
        return version
