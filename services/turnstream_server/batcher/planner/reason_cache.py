"""Reasons for waiting, read in a thread for calls whose deadline has passed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from turnstream.errors import TurnstreamError, WaitReason
from turnstream.store.client.connection import connect
from turnstream_server.bus.queries.wait_facts import read_snapshot
from turnstream_server.bus.queries.wait_reasons import reasons

logger = logging.getLogger(__name__)

MAX_REASONS: Final = 4
"""They travel in a header of the answer, which has little room."""

_LOOKS_EVERY_S: Final = 5.0
"""Many ranks wait for the same, and a look reads the ledger."""


_LOOK_S: Final = 0.8
"""Longest wait for a look, well within what a Get has for its answer."""


Look = Callable[[str], Awaitable[tuple[WaitReason, ...]]]
"""Returns the reasons why a run waits, the most important first."""


async def no_look(_: str) -> tuple[WaitReason, ...]:
    """Know no reason."""
    return ()


class _Look(NamedTuple):
    """A read of the reasons of one run, finished or in progress."""

    began_s: float
    task: asyncio.Task[tuple[WaitReason, ...]]


class ReasonCache:
    """Reads the reasons why the runs of a store wait.

    Args:
        url: address of the store.
    """

    def __init__(self, url: str) -> None:
        self._client = connect(url)
        self._looks: dict[str, _Look] = {}

    @property
    def num_kept(self) -> int:
        """Number of runs whose reasons are kept."""
        return len(self._looks)

    async def reasons(self, run: str) -> tuple[WaitReason, ...]:
        """Return the reasons why a run waits, at most a few seconds old.

        They accompany an error, and must not replace it: nothing is returned if they cannot be
        read, or not in time.
        """
        self._drop_old()
        look = self._looks.get(run)
        if look is None:
            task = asyncio.create_task(self._read(run))
            look = self._looks[run] = _Look(asyncio.get_running_loop().time(), task)
        try:
            async with asyncio.timeout(_LOOK_S):
                return await asyncio.shield(look.task)
        except TimeoutError:
            return ()  # the next call may have it

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _drop_old(self) -> None:
        """Drop the reasons that are too old to be returned; a read in progress is not repeated."""
        oldest_s = asyncio.get_running_loop().time() - _LOOKS_EVERY_S
        self._looks = {
            run: look
            for run, look in self._looks.items()
            if look.began_s >= oldest_s or not look.task.done()
        }

    async def _read(self, run: str) -> tuple[WaitReason, ...]:
        """Return the reasons of a run; none if they cannot be read, whatever the error."""
        try:
            return await asyncio.to_thread(self._look, run)
        except TurnstreamError:
            return ()
        except Exception:
            logger.exception("the reasons why run %s waits could not be read", run)
            return ()

    def _look(self, run: str) -> tuple[WaitReason, ...]:
        found = reasons(read_snapshot(self._client, run))
        return tuple(
            WaitReason(kind=str(reason.kind), sentence=reason.sentence, facts=dict(reason.facts))
            for reason in found[:MAX_REASONS]
        )
