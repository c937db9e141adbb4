"""The publishers of a gateway process, one per run and writer, and its open trajectories.

Each owner of keys has places of its own for them, which no other owner can take.

A trajectory that is in no cache is adopted from the store under the same writer name, which needs
no wait. So a gateway may be restarted, or another replica may get the next turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Final

import redis.asyncio

from turnstream.errors import RejectedError, TurnstreamError
from turnstream.store.client.cancellation import cancel_all
from turnstream.store.client.run_ids import find_run_async, is_id
from turnstream.store.run.configs import read_config_async
from turnstream.types import TrajectoryKey
from turnstream.types.names import RunId
from turnstream_server.gateway.rest.ingest.writers import IngestPublisher, IngestWriter
from turnstream_server.loops import repeat

MAX_PUBLISHERS: Final = 512
"""Writers of one owner of keys. Each has a connection to the store."""

MAX_TRAJECTORIES: Final = 16_384
"""Open trajectories of one owner."""

MAX_TOKEN_BYTES: Final = 512 << 20
"""Bytes of their tokens."""

_SWEEPS_PER_LEASE: Final = 4
_LONGEST_PAUSE_S: Final = 5.0
_CLOSE_S: Final = 2.0
_FRESH_S: Final = 1.0

logger = logging.getLogger(__name__)


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

    def keep(self, run_writer: RunWriter, slots: Iterable[Slot], *, now_s: float) -> None:
        """Keep the open trajectories of a request, and drop those whose clients are most silent."""
        for slot in slots:
            slot.used_s = now_s
            writer = slot.writer
            self._forget(run_writer, slot)
            if writer is None or writer.has_ended or writer.error is not None:
                slot.writer = None
                run_writer.remove(slot)
            else:
                run_writer.recent[slot] = None
                slot.num_bytes = writer.num_bytes
                self.num_open += 1
                self.num_bytes += slot.num_bytes
        if self._is_full:
            self._evict()

    def drop(self, run_writer: RunWriter, slots: Sequence[Slot]) -> None:
        """Drop trajectories without an end: their leases expire in the store."""
        for slot in slots:
            slot.drop()
            self._forget(run_writer, slot)
            run_writer.remove(slot)

    def forget(self, closed: RunWriter) -> None:
        """Free the places of a writer that is closed."""
        for slot in list(closed.slots.values()):
            self._forget(closed, slot)
        closed.slots.clear()

    def _evict(self) -> None:
        queues = [_oldest(each) for each in self.writers.values()]
        for _, _, run_writer, slot in heapq.merge(*queues):
            if not self._is_full:
                return
            self.drop(run_writer, [slot])

    @property
    def _is_full(self) -> bool:
        return self.num_open > MAX_TRAJECTORIES or self.num_bytes > MAX_TOKEN_BYTES

    def _forget(self, run_writer: RunWriter, slot: Slot) -> None:
        if slot in run_writer.recent:
            del run_writer.recent[slot]
            self.num_open -= 1
            self.num_bytes -= slot.num_bytes
            slot.num_bytes = 0


class Publishers:
    """All publishers of one gateway process.

    Args:
        url: address of the store.
        client: client of the store.
    """

    def __init__(self, url: str, client: redis.asyncio.Redis) -> None:
        self._url = url
        self._client = client
        self._places: dict[str, Places] = {}
        self._run_ids: dict[str, tuple[float, RunId]] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def borrow(
        self, run: str, writer: str, *, owner: str, is_shared: bool
    ) -> AsyncIterator[RunWriter]:
        """Yield the writer of a name in the run that has this name now.

        Args:
            run: name of the run.
            writer: name of the writer.
            owner: owner of the key: its writers are its own, as those of another process.
            is_shared: see `RunWriter`.

        Raises:
            RunNotFoundError: no such run.
            RejectedError: too many writers are active.
            StoreUnavailableError: the store cannot be reached.
        """
        run_writer = await self._found(run, writer, owner=owner, is_shared=is_shared)
        run_writer.num_active += 1
        run_writer.used_s = _now_s()
        try:
            yield run_writer
        finally:
            run_writer.num_active -= 1
            run_writer.used_s = _now_s()

    def keep(self, run_writer: RunWriter, slots: Iterable[Slot], *, owner: str) -> None:
        """Keep the open trajectories of a request; see `Places.keep`."""
        self._of(owner).keep(run_writer, slots, now_s=_now_s())

    async def close(self) -> None:
        """Send accepted writes, and close all publishers; trajectories stay open in the store."""
        self._is_closed = True
        if self._sweeping is not None:
            await cancel_all([self._sweeping])
        closing, self._places = self._places, {}
        for places in closing.values():
            for each in list(places.writers.values()):
                await _close(places, each)

    def _of(self, owner: str) -> Places:
        return self._places.setdefault(owner, Places())

    async def _found(self, run: str, writer: str, *, owner: str, is_shared: bool) -> RunWriter:
        run_id = await self._id_of(run)
        name = (run_id, writer)
        if (found := self._of(owner).writers.get(name)) is not None:
            return found
        _, config = await read_config_async(self._client, run_id)
        if len(self._of(owner).writers) >= MAX_PUBLISHERS:
            await _close_oldest(self._of(owner))
        places = self._of(owner)
        found = places.writers.get(name)
        if found is None:
            publisher = IngestPublisher(self._url, run_id, writer=writer)
            found = RunWriter(publisher, lease_s=config.lease_s, is_shared=is_shared)
            places.writers[name] = found
        if self._sweeping is None and not self._is_closed:
            self._sweeping = asyncio.create_task(
                repeat(self._sweep, what="silent writers are not dropped"), name="silent-writers"
            )
        return found

    async def _id_of(self, run: str) -> RunId:
        """Return the id of the run that has this name, or had it a second ago."""
        if is_id(run):
            return RunId(run)
        found_s, run_id = self._run_ids.get(run, (-_FRESH_S, None))
        if run_id is None or _now_s() - found_s >= _FRESH_S:
            run_id = await find_run_async(self._client, run)
            if len(self._run_ids) >= MAX_PUBLISHERS:
                self._run_ids.clear()
            self._run_ids[run] = (_now_s(), run_id)
        return run_id

    async def _sweep(self) -> None:
        """Wait for a while, and drop the trajectories of silent clients."""
        every = [each for places in self._places.values() for each in places.writers.values()]
        shortest_s = min([each.lease_s for each in every], default=60.0)
        await asyncio.sleep(min(_LONGEST_PAUSE_S, shortest_s / _SWEEPS_PER_LEASE))
        for owner, places in list(self._places.items()):
            await _drop_silent(places, _now_s())
            if not places.writers:
                self._places.pop(owner, None)


def _oldest(run_writer: RunWriter) -> Iterator[tuple[float, int, RunWriter, Slot]]:
    """Yield the trajectories of a writer that may be dropped, the most silent first."""
    for slot in list(run_writer.recent):
        if not slot.lock.locked():
            yield run_writer.renewed_s(slot), id(slot), run_writer, slot


async def _drop_silent(places: Places, now_s: float) -> None:
    for name, each in list(places.writers.items()):
        if each.num_active:
            continue
        if now_s - each.used_s > each.lease_s:
            del places.writers[name]
            await _close(places, each)
        elif each.is_shared:
            places.drop(each, each.silent(now_s=now_s))


async def _close_oldest(places: Places) -> None:
    idle = [(each.used_s, name) for name, each in places.writers.items() if not each.num_active]
    if not idle:
        text = f"all {MAX_PUBLISHERS} writers that a key may have in the gateway are active"
        raise RejectedError(text, 1.0)
    await _close(places, places.writers.pop(min(idle)[1]))


async def _close(places: Places, closing: RunWriter) -> None:
    places.forget(closing)
    try:
        await closing.publisher.close(_CLOSE_S)
    except TurnstreamError as error:
        logger.warning("run %s: %s", closing.publisher.run, error)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
