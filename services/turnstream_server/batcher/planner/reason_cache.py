"""Reasons for waiting, read in a thread for calls whose deadline has passed."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, NamedTuple

from turnstream.errors import TurnstreamError, WaitReason
from turnstream.store.client.connection import connect
from turnstream.store.waits.wait_reasons import reasons
from turnstream_server.bus.queries.run_snapshot import read_snapshot

logger = logging.getLogger(__name__)

MAX_REASONS: Final = 4
"""A header of the answer carries them, and its size is limited."""

_READ_EVERY_S: Final = 5.0
"""Many ranks wait for the same, and a read scans the ledger."""

_READ_TIMEOUT_S: Final = 0.8
"""Longest wait for a read, well within the time that a Get has for its answer."""


class _Read(NamedTuple):
    """A read of the reasons of one run, finished or in progress."""

    began_s: float
    task: asyncio.Task[list[WaitReason]]


class ReasonCache:
    """Reads the reasons why the runs of a store wait."""

    def __init__(self, url: str) -> None:
        self._client = connect(url)
        self._reads: dict[str, _Read] = {}

    async def reasons(self, run: str) -> list[WaitReason]:
        """Return the reasons why a run waits, the most important first, a few seconds old at most.

        They accompany an error, and must not replace it: nothing is returned if they cannot be
        read, or not in time.
        """
        now_s = asyncio.get_running_loop().time()
        oldest_s = now_s - _READ_EVERY_S
        for name, read in [*self._reads.items()]:
            if read.began_s < oldest_s and read.task.done():
                del self._reads[name]
        if run not in self._reads:
            self._reads[run] = _Read(now_s, asyncio.create_task(self._read(run)))
        done, _ = await asyncio.wait([self._reads[run].task], timeout=_READ_TIMEOUT_S)
        return done.pop().result() if done else []

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    async def _read(self, run: str) -> list[WaitReason]:
        try:
            snapshot = await asyncio.to_thread(read_snapshot, self._client, run)
        except TurnstreamError:
            return []
        except Exception:
            logger.exception("the reasons why run %s waits could not be read", run)
            return []
        return reasons(snapshot)[:MAX_REASONS]
