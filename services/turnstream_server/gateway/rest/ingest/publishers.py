"""The publishers of a gateway process, one per run and writer, and its open trajectories.

A trajectory that is in no cache is adopted from the store under the same writer name, which needs
no wait. So a gateway may be restarted, or another replica may get the next turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

import redis.asyncio

from turnstream.errors import RejectedError, TurnstreamError
from turnstream.store.client.cancellation import cancel_all
from turnstream.store.client.run_ids import find_run_async
from turnstream.store.run.configs import read_config_async
from turnstream.types import TrajectoryKey
from turnstream.types.names import RunId
from turnstream_server.gateway.rest.ingest.writers import IngestPublisher, IngestWriter

MAX_PUBLISHERS: Final = 512
"""Each has a connection to the store."""

MAX_TRAJECTORIES: Final = 16_384
MAX_TOKEN_BYTES: Final = 512 << 20

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
        num_active: requests that use it.
        used_s: time of the last request.
    """

    def __init__(self, publisher: IngestPublisher, *, lease_s: float, is_shared: bool) -> None:
        self.publisher = publisher
        self.lease_s = lease_s
        self.is_shared = is_shared
        self.slots: dict[TrajectoryKey, Slot] = {}
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


class Publishers:
    """All publishers of one gateway process.

    Args:
        url: address of the store.
        client: client of the store.
    """

    def __init__(self, url: str, client: redis.asyncio.Redis) -> None:
        self._url = url
        self._client = client
        self._writers: dict[tuple[str, str], RunWriter] = {}
        self._recent: OrderedDict[Slot, RunWriter] = OrderedDict()
        self._run_ids: dict[str, tuple[float, RunId]] = {}
        self._num_bytes = 0
        self._sweeping: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Return the number of cached trajectories."""
        return len(self._recent)

    @contextlib.asynccontextmanager
    async def lend(self, run: str, writer: str, *, is_shared: bool) -> AsyncIterator[RunWriter]:
        """Yield the writer of a name in the run that has this name now.

        Raises:
            RunNotFoundError: no such run.
            RejectedError: too many writers are active.
            StoreUnavailableError: the store cannot be reached.
        """
        lent = await self._found(run, writer, is_shared=is_shared)
        lent.num_active += 1
        lent.used_s = _now_s()
        try:
            yield lent
        finally:
            lent.num_active -= 1
            lent.used_s = _now_s()

    def keep(self, lent: RunWriter, slots: Iterable[Slot]) -> None:
        """Keep the open trajectories of a request, and drop those that were used least recently."""
        now_s = _now_s()
        for slot in slots:
            slot.used_s = now_s
            writer = slot.writer
            if writer is not None and (writer.has_ended or writer.error is not None):
                slot.writer = writer = None
            self._num_bytes -= slot.num_bytes
            slot.num_bytes = 0 if writer is None else writer.num_bytes
            self._num_bytes += slot.num_bytes
            if writer is None:
                self._remove(lent, slot)
            else:
                self._recent[slot] = lent
                self._recent.move_to_end(slot)
        self._evict()

    async def close(self) -> None:
        """Send accepted writes, and close all publishers; trajectories stay open in the store."""
        self._is_closed = True
        if self._sweeping is not None:
            await cancel_all([self._sweeping])
        closing, self._writers = list(self._writers.values()), {}
        for each in closing:
            await self._close(each)

    async def _found(self, run: str, writer: str, *, is_shared: bool) -> RunWriter:
        run_id = await self._id_of(run)
        found = self._writers.get((run_id, writer))
        if found is not None:
            return found
        _, config = await read_config_async(self._client, run_id)
        if len(self._writers) >= MAX_PUBLISHERS:
            await self._close_oldest()
        found = self._writers.get((run_id, writer))
        if found is None:
            publisher = IngestPublisher(self._url, run_id, writer=writer)
            found = RunWriter(publisher, lease_s=config.lease_s, is_shared=is_shared)
            self._writers[run_id, writer] = found
        if self._sweeping is None and not self._is_closed:
            self._sweeping = asyncio.create_task(self._sweep(), name="silent-writers")
        return found

    async def _id_of(self, run: str) -> RunId:
        """Return the id of the run that has this name, or had it a second ago."""
        found_s, run_id = self._run_ids.get(run, (-_FRESH_S, None))
        if run_id is None or _now_s() - found_s >= _FRESH_S:
            run_id = await find_run_async(self._client, run)
            if len(self._run_ids) >= MAX_PUBLISHERS:
                self._run_ids.clear()
            self._run_ids[run] = (_now_s(), run_id)
        return run_id

    async def _close_oldest(self) -> None:
        idle = [(each.used_s, name) for name, each in self._writers.items() if not each.num_active]
        if not idle:
            raise RejectedError(f"all {MAX_PUBLISHERS} writers of the gateway are active", 1.0)
        await self._close(self._writers.pop(min(idle)[1]))

    async def _close(self, closing: RunWriter) -> None:
        for slot in list(closing.slots.values()):
            self._forget(slot)
        closing.slots.clear()
        try:
            await closing.publisher.close(_CLOSE_S)
        except TurnstreamError as error:
            logger.warning("run %s: %s", closing.publisher.run, error)

    async def _sweep(self) -> None:
        """Drop the trajectories of silent clients, again and again."""
        while True:
            shortest_s = min([each.lease_s for each in self._writers.values()], default=60.0)
            await asyncio.sleep(min(_LONGEST_PAUSE_S, shortest_s / _SWEEPS_PER_LEASE))
            try:
                await self._drop_silent(_now_s())
            except Exception:
                logger.exception("silent writers are not dropped")

    async def _drop_silent(self, now_s: float) -> None:
        for name, each in list(self._writers.items()):
            if each.num_active:
                continue
            if now_s - each.used_s > each.lease_s:
                del self._writers[name]
                await self._close(each)
            elif each.is_shared:
                self._drop(each, _silent(each, now_s=now_s))

    def _drop(self, lent: RunWriter, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.drop()
            self._remove(lent, slot)

    def _evict(self) -> None:
        excess = [slot for slot in self._recent if not slot.lock.locked()] if self._is_full else []
        for slot in excess:
            if not self._is_full:
                return
            self._drop(self._recent[slot], [slot])

    @property
    def _is_full(self) -> bool:
        return len(self._recent) > MAX_TRAJECTORIES or self._num_bytes > MAX_TOKEN_BYTES

    def _remove(self, lent: RunWriter, slot: Slot) -> None:
        self._forget(slot)
        if lent.slots.get(slot.key) is slot:
            del lent.slots[slot.key]

    def _forget(self, slot: Slot) -> None:
        if self._recent.pop(slot, None) is not None:
            self._num_bytes -= slot.num_bytes
            slot.num_bytes = 0


def _silent(lent: RunWriter, *, now_s: float) -> list[Slot]:
    """Return the trajectories that no request has named for a lease."""
    return [
        slot
        for slot in lent.slots.values()
        if not slot.lock.locked() and now_s - slot.used_s > lent.lease_s
    ]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
