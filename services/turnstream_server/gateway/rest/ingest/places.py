"""The open trajectories of a gateway process: their places, which belong to the owners of keys."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Final

from turnstream.types import TrajectoryKey
from turnstream_server.gateway.rest.ingest.writers import IngestPublisher, IngestWriter

MAX_TRAJECTORIES: Final = 16_384
"""Open trajectories of one owner."""

MAX_TOKEN_BYTES: Final = 512 << 20
"""Bytes of their tokens."""


class Slot:
    """The place of one trajectory in the cache.

    Attributes:
        key: the trajectory.
        lock: held by the request that writes it.
        writer: its writer; None while it is not open here.
        used_s: time of the last request that named it.
        num_bytes: bytes that it counts for.
    """

    __slots__ = ("key", "lock", "num_bytes", "used_s", "writer")

    def __init__(self, key: TrajectoryKey) -> None:
        self.key = key
        self.lock = asyncio.Lock()
        self.writer: IngestWriter | None = None
        self.used_s = 0.0
        self.num_bytes = 0

    def drop(self) -> None:
        """Drop the writer without an end; its lease expires in the store."""
        if self.writer is not None:
            self.writer.drop()
            self.writer = None


Slots = dict[TrajectoryKey, Slot]


class RunWriter:
    """One writer name in one run: its publisher, and its open trajectories.

    Args:
        publisher: its publisher.
        lease_s: length of a lease of the run.
        is_shared: no client named itself, so that each trajectory is a client of its own.

    Attributes:
        slots: its trajectories.
        recent: the open ones among them, those that were named last at the end.
        num_active: requests that use it.
        used_s: time of the last request.
    """

    def __init__(self, publisher: IngestPublisher, *, lease_s: float, is_shared: bool) -> None:
        self.publisher = publisher
        self.lease_s = lease_s
        self.is_shared = is_shared
        self.slots: dict[TrajectoryKey, Slot] = {}
        self.recent: OrderedDict[Slot, None] = OrderedDict()
        self.num_active = 0
        self.used_s = 0.0

    @contextlib.asynccontextmanager
    async def locked(self, keys: Iterable[TrajectoryKey]) -> AsyncIterator[Slots]:
        """Hold the locks of some trajectories in the block; yield their places.

        All requests take locks in the same order, so that no two wait for each other.
        """
        slots: Slots = {}
        with contextlib.ExitStack() as held:
            for key in sorted(set(keys)):
                slots[key] = slot = await self._acquired(key)
                held.callback(slot.lock.release)
            yield slots

    async def _acquired(self, key: TrajectoryKey) -> Slot:
        while True:
            slot = self.slots.setdefault(key, Slot(key))
            await slot.lock.acquire()
            if self.slots.get(key) is slot:
                return slot
            slot.lock.release()  # it was removed while this request waited

    def remove(self, slot: Slot) -> None:
        """Remove the place of a trajectory; the next request that names it makes a new one."""
        if self.slots.get(slot.key) is slot:
            del self.slots[slot.key]

    def renewed_s(self, slot: Slot) -> float:
        """Return the time at which the client of a trajectory was last not silent.

        Every request of a named writer counts, as for its leases.
        """
        return slot.used_s if self.is_shared else self.used_s

    def silent(self, *, now_s: float) -> list[Slot]:
        """Return the trajectories that no request has named for a lease."""
        return [
            slot
            for slot in self.slots.values()
            if not slot.lock.locked() and now_s - slot.used_s > self.lease_s
        ]


class Places:
    """The writers and open trajectories of one owner of keys. No other owner can take a place.

    Attributes:
        writers: the writers by run and name.
        num_open: open trajectories.
        num_bytes: bytes that they count for.
    """

    def __init__(self) -> None:
        self.writers: dict[tuple[str, str], RunWriter] = {}
        self.num_open = 0
        self.num_bytes = 0

    def keep(self, lent: RunWriter, slots: Iterable[Slot], *, now_s: float) -> None:
        """Keep the open trajectories of a request, and drop those whose clients are most silent."""
        for slot in slots:
            slot.used_s = now_s
            writer = slot.writer
            self._forget(lent, slot)
            if writer is None or writer.has_ended or writer.error is not None:
                slot.writer = None
                lent.remove(slot)
            else:
                lent.recent[slot] = None
                slot.num_bytes = writer.num_bytes
                self.num_open += 1
                self.num_bytes += slot.num_bytes
        if self._is_full:
            self._evict()

    def drop(self, lent: RunWriter, slots: Sequence[Slot]) -> None:
        """Drop trajectories without an end: their leases expire in the store."""
        for slot in slots:
            slot.drop()
            self._forget(lent, slot)
            lent.remove(slot)

    def forget(self, closed: RunWriter) -> None:
        """Free the places of a writer that is closed."""
        for slot in list(closed.slots.values()):
            self._forget(closed, slot)
        closed.slots.clear()

    def _evict(self) -> None:
        queues = [_oldest(each) for each in self.writers.values()]
        for _, _, lent, slot in heapq.merge(*queues):
            if not self._is_full:
                return
            self.drop(lent, [slot])

    @property
    def _is_full(self) -> bool:
        return self.num_open > MAX_TRAJECTORIES or self.num_bytes > MAX_TOKEN_BYTES

    def _forget(self, lent: RunWriter, slot: Slot) -> None:
        if slot in lent.recent:
            del lent.recent[slot]
            self.num_open -= 1
            self.num_bytes -= slot.num_bytes
            slot.num_bytes = 0


def _oldest(lent: RunWriter) -> Iterator[tuple[float, int, RunWriter, Slot]]:
    """Yield the trajectories of a writer that may be dropped, the most silent first."""
    for slot in list(lent.recent):
        if not slot.lock.locked():
            yield lent.renewed_s(slot), id(slot), lent, slot
