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
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Final

import redis.asyncio

from turnstream.errors import RejectedError, TurnstreamError
from turnstream.generator import AsyncPublisher
from turnstream.store.client.cancellation import cancel_all
from turnstream.store.client.run_ids import find_run_async
from turnstream.store.run.configs import read_config_async
from turnstream.types import DeclaredColumn, GroupOpened, TrajectoryKey
from turnstream.types.names import RunId, is_run_id
from turnstream_server.gateway.rest.ingest import writes
from turnstream_server.gateway.rest.ingest.writes import IngestWriter
from turnstream_server.loops import repeat

MAX_PUBLISHERS: Final = 512
"""Writers of one owner of keys. Each has a connection to the store."""

MAX_TRAJECTORIES: Final = 16_384
"""Open trajectories of one owner."""

MAX_TOKEN_BYTES: Final = 512 << 20
"""Bytes of their tokens."""

_MAX_KEPT_BYTES: Final = 16 << 20
"""Bytes that each of many publishers keeps for a restart of the store."""

_SWEEPS_PER_LEASE: Final = 4
_LONGEST_PAUSE_S: Final = 5.0
_CLOSE_S: Final = 2.0
_FRESH_S: Final = 1.0

logger = logging.getLogger(__name__)


class Slot:
    """The place of one trajectory in the cache. The request that writes it holds the lock.

    `writer` is None while it is not open here; `used_s` is the time of the last request. Until
    `kept_until_s` it is not dropped as silent, so that its lease is renewed. Both are loop times.
    """

    __slots__ = ("kept_until_s", "key", "lock", "used_s", "writer")

    def __init__(self, key: TrajectoryKey) -> None:
        self.key = key
        self.lock = asyncio.Lock()
        self.writer: IngestWriter | None = None
        self.used_s = 0.0
        self.kept_until_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a writer is here that takes writes."""
        return self.writer is not None and self.writer.error is None

    def drop(self) -> None:
        """Drop the writer without an end; its lease expires in the store."""
        if self.writer is not None:
            self.writer.drop()
            self.writer = None


Slots = dict[TrajectoryKey, Slot]


class RunWriter(AsyncPublisher):
    """The publisher of one writer name in one run, with its open trajectories.

    An admission never waits here.

    Attributes:
        is_shared: no client named itself, so that each trajectory is a client of its own.
        slots: its trajectories.
        recent: the open ones among them with the bytes of their tokens, the last named at the end.
        num_active: requests that use it.
    """

    _writer_kind = IngestWriter

    def __init__(self, url: str, run: str, *, writer: str, lease_s: float, is_shared: bool) -> None:
        super().__init__(
            url,
            run,
            writer=writer,
            timeout_s=writes.STORE_TIMEOUT_S,
            admission_timeout_s=0,
            max_kept_bytes=_MAX_KEPT_BYTES,
        )
        self.lease_s = lease_s
        self.is_shared = is_shared
        self.slots: Slots = {}
        self.recent: dict[Slot, int] = {}
        self.num_bytes = 0
        self.num_active = 0
        self.used_s = 0.0

    @property
    def run(self) -> str:
        """Return the id of the run."""
        return self._outbox.run

    @property
    def writer(self) -> str:
        """Return the name of the writer, as leases have it."""
        return self._outbox.writer

    def opened(self, group: GroupOpened, epochs: Mapping[TrajectoryKey, int]) -> list[IngestWriter]:
        """Return the writers of trajectories that the store has opened with these epochs."""
        queues = self._sender.put(
            lambda: self._outbox.admissions.begin_opened(group, epochs, now_s=time.monotonic())
        )
        return [
            IngestWriter(self._sender, self._outbox, group, queue.key, queue) for queue in queues
        ]

    async def adopt_key(self, key: TrajectoryKey) -> IngestWriter:
        """Return the writer of an open trajectory; errors as of `Publisher.adopt`."""
        writer = await self._adopt(key)
        assert isinstance(writer, IngestWriter)
        writer.count_stored()
        return writer

    async def columns(self) -> tuple[DeclaredColumn, ...]:
        """Return the extra columns that the run declares."""
        return await self._sender.learn_columns()

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

    def keep(self, slot: Slot) -> None:
        """Count a trajectory that a request has named; remove one that is not open."""
        slot.used_s = _now_s()
        self.num_bytes -= self.recent.pop(slot, 0)
        writer = slot.writer
        if writer is not None and slot.is_open and not writer.has_ended:
            self.recent[slot] = writer.num_bytes
            self.num_bytes += writer.num_bytes
        else:
            slot.writer = None
            self._remove(slot)

    def drop(self, slot: Slot) -> None:
        """Drop a trajectory without an end: its lease expires in the store."""
        slot.drop()
        self.num_bytes -= self.recent.pop(slot, 0)
        self._remove(slot)

    def drop_silent(self, now_s: float) -> None:
        """Drop the trajectories that no request has named for a lease, except kept ones."""
        for slot in list(self.slots.values()):
            is_silent = now_s - slot.used_s > self.lease_s and now_s >= slot.kept_until_s
            if is_silent and not slot.lock.locked():
                self.drop(slot)

    def has_kept(self, now_s: float) -> bool:
        """Return whether a trajectory is kept, also without requests."""
        return any(now_s < slot.kept_until_s for slot in self.slots.values())

    def oldest(self) -> Iterator[tuple[float, int, RunWriter, Slot]]:
        """Yield the trajectories that may be dropped, the most silent first.

        Every request of a named writer renews all of them, as their leases.
        """
        for slot in list(self.recent):
            if not slot.lock.locked():
                yield slot.used_s if self.is_shared else self.used_s, id(slot), self, slot

    def _remove(self, slot: Slot) -> None:
        """Remove a place; the next request that names the trajectory makes a new one."""
        if self.slots.get(slot.key) is slot:
            del self.slots[slot.key]


RunWriters = dict[tuple[str, str], RunWriter]
"""The writers of one owner, by run and name."""


class Publishers:
    """All publishers of one gateway process."""

    def __init__(self, url: str, client: redis.asyncio.Redis) -> None:
        self._url = url
        self._client = client
        self._writers: dict[str, RunWriters] = {}
        self._run_ids: dict[str, tuple[float, RunId]] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def borrow(
        self, run: str, writer: str, keys: Iterable[TrajectoryKey], *, owner: str, is_shared: bool
    ) -> AsyncIterator[tuple[RunWriter, Slots]]:
        """Yield a writer of the run that has this name now, and the locked places of trajectories.

        RunNotFoundError for no such run, RejectedError for too many active writers.
        """
        run_writer = await self._found(run, writer, owner=owner, is_shared=is_shared)
        run_writer.num_active += 1
        run_writer.used_s = _now_s()
        try:
            async with run_writer.locked(keys) as slots:
                try:
                    yield run_writer, slots
                finally:
                    for slot in slots.values():
                        run_writer.keep(slot)
                    _evict(self._writers.get(owner, {}))
        finally:
            run_writer.num_active -= 1
            run_writer.used_s = _now_s()

    async def close(self) -> None:
        """Send accepted writes, and close all publishers; trajectories stay open in the store."""
        self._is_closed = True
        if self._sweeping is not None:
            await cancel_all([self._sweeping])
        closing, self._writers = self._writers, {}
        for writers in closing.values():
            for each in list(writers.values()):
                await _close(each)

    async def _found(self, run: str, writer: str, *, owner: str, is_shared: bool) -> RunWriter:
        run_id = await self._id_of(run)
        name = (run_id, writer)
        if (found := self._writers.get(owner, {}).get(name)) is not None:
            return found
        _, config = await read_config_async(self._client, run_id)
        if len(writers := self._writers.get(owner, {})) >= MAX_PUBLISHERS:
            await _close_oldest(writers)
        writers = self._writers.setdefault(owner, {})
        if name not in writers:
            writers[name] = RunWriter(
                self._url, run_id, writer=writer, lease_s=config.lease_s, is_shared=is_shared
            )
        if self._sweeping is None and not self._is_closed:
            self._sweeping = asyncio.create_task(
                repeat(self._sweep, what="silent writers are not dropped"), name="silent-writers"
            )
        return writers[name]

    async def _id_of(self, run: str) -> RunId:
        """Return the id of the run that has this name, or had it a second ago."""
        if is_run_id(run):
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
        leases_s = [each.lease_s for some in self._writers.values() for each in some.values()]
        shortest_s = min(leases_s, default=60.0)
        await asyncio.sleep(min(_LONGEST_PAUSE_S, shortest_s / _SWEEPS_PER_LEASE))
        for owner, writers in list(self._writers.items()):
            await _drop_silent(writers, _now_s())
            if not writers:
                self._writers.pop(owner, None)


def _evict(writers: RunWriters) -> None:
    """Drop trajectories of one owner that has too many, those whose clients are most silent."""
    num_open = sum(len(each.recent) for each in writers.values())
    num_bytes = sum(each.num_bytes for each in writers.values())
    if num_open <= MAX_TRAJECTORIES and num_bytes <= MAX_TOKEN_BYTES:
        return
    for _, _, run_writer, slot in heapq.merge(*[each.oldest() for each in writers.values()]):
        if num_open <= MAX_TRAJECTORIES and num_bytes <= MAX_TOKEN_BYTES:
            return
        num_open, num_bytes = num_open - 1, num_bytes - run_writer.recent[slot]
        run_writer.drop(slot)


async def _drop_silent(writers: RunWriters, now_s: float) -> None:
    for name, each in list(writers.items()):
        if each.num_active:
            continue
        is_silent = now_s - each.used_s > each.lease_s
        if is_silent and not each.has_kept(now_s):
            del writers[name]
            await _close(each)
        elif is_silent or each.is_shared:
            each.drop_silent(now_s)


async def _close_oldest(writers: RunWriters) -> None:
    idle = [(each.used_s, name) for name, each in writers.items() if not each.num_active]
    if not idle:
        text = f"all {MAX_PUBLISHERS} writers that a key may have in the gateway are active"
        raise RejectedError(text, 1.0)
    await _close(writers.pop(min(idle)[1]))


async def _close(closing: RunWriter) -> None:
    try:
        await closing.close(_CLOSE_S)
    except TurnstreamError as error:
        logger.warning("run %s: %s", closing.run, error)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
