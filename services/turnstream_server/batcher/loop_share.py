"""How long one run's events may keep the event loop of its batcher, which other runs share."""

from __future__ import annotations

import asyncio
from typing import Final

from turnstream_server.bus.events import EventEntry

FOLD_SLICE: Final = 100
"""Weight of the events that are folded before the event loop gets its turn: about 2 ms."""

BYTES_PER_WEIGHT: Final = 300
"""Bytes of an event's record that weigh as much as another event."""


class LoopShare:
    """Gives the event loop its turn, by the number and the bytes of the events that were folded."""

    def __init__(self) -> None:
        self._weight = 0.0

    async def after(self, entry: EventEntry) -> None:
        """Count an event; yield to the event loop at the end of a slice."""
        self._weight += 1 + len(entry.record) / BYTES_PER_WEIGHT
        if self._weight >= FOLD_SLICE:
            self._weight = 0.0
            await asyncio.sleep(0)
