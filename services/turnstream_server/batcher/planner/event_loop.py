"""The share of each run in the time of a batcher's event loop."""

from __future__ import annotations

import asyncio
from typing import Final

from turnstream_server.ledger.core.scan import EventEntry

COMPACT_SLICE: Final = 100
"""Weight of the events that are folded before the event loop runs other tasks: about 2 ms."""

BYTES_PER_WEIGHT: Final = 300
"""Bytes of an event's record that weigh as much as another event."""


class LoopShare:
    """Yields to other tasks after each slice of folded events, by their number and bytes."""

    def __init__(self) -> None:
        self._weight = 0.0

    async def after(self, entry: EventEntry) -> None:
        """Count an event; yield to the event loop at the end of a slice."""
        self._weight += 1 + len(entry.record) / BYTES_PER_WEIGHT
        if self._weight >= COMPACT_SLICE:
            self._weight = 0.0
            await asyncio.sleep(0)
