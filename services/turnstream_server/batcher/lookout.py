"""Why nobody gets data, for calls whose deadline has passed: looked up beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from turnstream.errors import TurnstreamError, WaitReason
from turnstream.store.connection import connect
from turnstream_server.bus.reasons import reasons
from turnstream_server.bus.waits import read_snapshot

MAX_REASONS: Final = 4
"""They travel in a header of the answer, which has little room."""

_LOOKS_EVERY_S: Final = 5.0
"""Many ranks wait for the same, and a look reads the ledger."""


_LOOK_S: Final = 0.8
"""Longest wait for a look, well within what a Get has for its answer."""


Look = Callable[[str], Awaitable[tuple[WaitReason, ...]]]
"""What a run waits for, the most important first."""


async def no_look(_: str) -> tuple[WaitReason, ...]:
    """Know no reason."""
    return ()


class Lookout:
    """Says what the runs of a store wait for.

    Args:
        url: of the store.
    """

    def __init__(self, url: str) -> None:
        self._client = connect(url)
        self._looks: dict[str, tuple[float, asyncio.Task[tuple[WaitReason, ...]]]] = {}

    async def reasons(self, run: str) -> tuple[WaitReason, ...]:
        """What a run waits for, as of a few seconds ago at most.

        Nothing where the store cannot say, or not in time: this is told beside an error, and must
        not hide it.
        """
        now_s = asyncio.get_running_loop().time()
        looked_s, look = self._looks.get(run, (float("-inf"), None))
        if look is None or now_s - looked_s > _LOOKS_EVERY_S:
            look = asyncio.create_task(asyncio.to_thread(self._look, run))
            self._looks[run] = now_s, look
        try:
            async with asyncio.timeout(_LOOK_S):
                return await asyncio.shield(look)
        except TimeoutError:
            return ()  # the next call may have it

    def close(self) -> None:
        """Let the connection go."""
        self._client.close()

    def _look(self, run: str) -> tuple[WaitReason, ...]:
        try:
            found = reasons(read_snapshot(self._client, run))
        except TurnstreamError:
            return ()
        return tuple(
            WaitReason(kind=str(reason.kind), sentence=reason.sentence, facts=dict(reason.facts))
            for reason in found[:MAX_REASONS]
        )
