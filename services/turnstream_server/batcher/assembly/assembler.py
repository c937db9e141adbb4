"""Assembly of a planned batch to the encoded share of one rank.

It runs in threads of its own, so the event loop is free. Results are cached::

    rows of a mini-batch           when the leader checks the plan, or at the first Get
    cut for a world size           at the first Get of any rank
    share of (rank, world size)    at the first Get; with the last rank's, rows and cut are dropped
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Generic, NamedTuple, TypeVar

from turnstream.errors import InvalidConfigError, NotReadyError, RunNotFoundError
from turnstream.records.batches import EncodedMiniBatch
from turnstream.records.configs import decode_config
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.client.replies import translating
from turnstream.store.run.configs import open_run, stored_config
from turnstream.types import Rows
from turnstream_server.batcher.assembly.payload import Damage, DamagedPayloadError, PayloadReader
from turnstream_server.batcher.assembly.shares import (
    Cut,
    PlannedBatch,
    build_rows,
    check_assembly_version,
    cut_mini_batch,
    encode_share,
    num_bytes_of,
)
from turnstream_server.ledger.core.frontier import not_retained, read_frontier
from turnstream_server.ledger.planning.manifests import read_plan
from turnstream_server.telemetry.instruments import histogram
from turnstream_server.telemetry.tracing import span

NUM_THREADS: Final = min(4, max(1, (os.cpu_count() or 1) // 2))
"""They share one interpreter lock with the event loop, so that more of them mostly wait. On two
cores a second one makes the first batch wait for the check of the second, by 40 ms."""

MAX_SHARE_BYTES: Final = 48 << 20
"""Most payload of a mini-batch that `read_share` returns. Its assembly takes a few times that."""

_ASSEMBLY_SECONDS = histogram(
    "turnstream_batcher_assembly_seconds", "Time to make the rows of a mini-batch."
)

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class _Key(NamedTuple):
    """The rows of a mini-batch; with a world size their cut, with a rank also the share of it."""

    run: str
    step: int
    manifest_hash: str
    mini_batch: int
    dp_world_size: int = 0
    dp_rank: int = -1


class Assembler:
    """Makes the shares of planned batches, with a cache of at most `max_cache_bytes`."""

    def __init__(self, url: str, *, max_cache_bytes: int) -> None:
        self._payload = PayloadReader(url)
        self._cache = SingleFlightCache[_Key, Any](num_bytes_of, max_bytes=max_cache_bytes)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="assembler")

    async def check(self, batch: PlannedBatch) -> None:
        """Fetch and check all payload of a batch, and keep its rows for the first Get."""
        for mini_batch in range(len(batch.manifest.mini_batches)):
            await self._rows(batch, mini_batch)

    async def examine(self, batch: PlannedBatch) -> tuple[Damage, ...]:
        """Return the damaged payload of a batch, read from the store and not from the cache."""
        check_assembly_version(batch.manifest)
        damages: list[Damage] = []
        for mini_batch in range(len(batch.manifest.mini_batches)):
            try:
                await self._build_rows(batch, mini_batch)
            except DamagedPayloadError as error:
                damages += error.damages
        return tuple(damages)

    async def share(
        self, batch: PlannedBatch, *, mini_batch: int, dp_rank: int, dp_world_size: int
    ) -> EncodedMiniBatch:
        """Return one rank's share of a mini-batch; the same arguments give the same bytes."""
        key = _key(batch, mini_batch, dp_world_size, dp_rank)
        share = await self._cache.get(key, lambda: self._make_share(batch, key))
        is_last = dp_rank == dp_world_size - 1
        if is_last and all(key._replace(dp_rank=rank) in self._cache for rank in range(dp_rank)):
            sources = (_key(batch, mini_batch), key._replace(dp_rank=-1))
            self._cache.drop(lambda key: key in sources)
        return share

    def prepare(
        self, batch: PlannedBatch, *, mini_batch: int, dp_rank: int, dp_world_size: int
    ) -> None:
        """Start to make a share that will be requested soon."""
        key = _key(batch, mini_batch, dp_world_size, dp_rank)
        self._cache.prepare(key, lambda: self._make_share(batch, key))

    def release(self, run: str, *, through_step: int) -> None:
        """Drop the cached values of the steps of a run up to this one."""
        self._cache.drop(lambda key: key.run == run and key.step <= through_step)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run a function in one of the threads, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached values."""
        return self._cache.num_bytes

    async def close(self) -> None:
        """Stop, once the running functions have returned."""
        await self._cache.close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._payload.close()

    async def _make_share(self, batch: PlannedBatch, key: _Key) -> EncodedMiniBatch:
        check_assembly_version(batch.manifest)
        _, _, _, mini_batch, world_size, dp_rank = key
        rows = await self._rows(batch, mini_batch)
        cut: Cut = await self._cache.get(
            key._replace(dp_rank=-1),
            lambda: self.in_thread(lambda: cut_mini_batch(batch, rows, dp_world_size=world_size)),
        )
        return await self.in_thread(
            lambda: encode_share(batch, rows, cut, mini_batch=mini_batch, dp_rank=dp_rank)
        )

    async def _rows(self, batch: PlannedBatch, mini_batch: int) -> Rows:
        key = _key(batch, mini_batch)
        return await self._cache.get(key, lambda: self._build_rows(batch, mini_batch))

    async def _build_rows(self, batch: PlannedBatch, mini_batch: int) -> Rows:
        with span("assemble", mini_batch=mini_batch), _ASSEMBLY_SECONDS.time():
            return await self.in_thread(
                lambda: build_rows(batch, self._payload, mini_batch=mini_batch)
            )


def _key(batch: PlannedBatch, *which: int) -> _Key:
    return _Key(batch.manifest.run, batch.manifest.step, batch.manifest_hash, *which)


class SingleFlightCache(Generic[Key, Value]):
    """Caches expensive values: each is made once for all callers.

    The least recently used values are dropped above `max_bytes`. A larger value is returned to its
    callers and not kept. An error is not kept either: all callers get it, and the next call starts
    again.
    """

    def __init__(self, num_bytes_of: Callable[[Value], int], *, max_bytes: int) -> None:
        self.num_bytes = 0
        self._num_bytes_of = num_bytes_of
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Key, Value] = OrderedDict()
        self._in_progress: dict[Key, asyncio.Task[Value]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    async def get(self, key: Key, make: Callable[[], Awaitable[Value]]) -> Value:
        """Return the value of `key`; `make` is called unless the value exists or is being made.

        A cancelled caller does not stop `make`: others may wait for the same value.
        """
        if key not in self._kept:
            return await asyncio.shield(self._begin(key, make))
        self._kept.move_to_end(key)
        return self._kept[key]

    def prepare(self, key: Key, make: Callable[[], Awaitable[Value]]) -> None:
        """Begin to make a value that will be requested soon."""
        if key not in self._kept:
            self._begin(key, make)

    def drop(self, is_unwanted: Callable[[Key], bool]) -> None:
        """Drop the values of all such keys; values that are being made are kept."""
        for key in [key for key in self._kept if is_unwanted(key)]:
            self.num_bytes -= self._num_bytes_of(self._kept.pop(key))

    async def close(self) -> None:
        """Cancel the values that are being made, and drop all others."""
        tasks = list(self._in_progress.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._in_progress.clear()
        self.drop(lambda _: True)

    def _begin(self, key: Key, make: Callable[[], Awaitable[Value]]) -> asyncio.Task[Value]:
        task = self._in_progress.get(key)
        if task is None:
            task = self._in_progress[key] = asyncio.create_task(self._make(key, make))
            task.add_done_callback(_mark_retrieved)
        return task

    async def _make(self, key: Key, make: Callable[[], Awaitable[Value]]) -> Value:
        try:
            value = await make()
        finally:
            self._in_progress.pop(key, None)
        self._keep(key, value)
        return value

    def _keep(self, key: Key, value: Value) -> None:
        num_bytes = self._num_bytes_of(value)
        if num_bytes > self._max_bytes:
            return
        self._kept[key] = value
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= self._num_bytes_of(oldest)


def _mark_retrieved(task: asyncio.Task[Any]) -> None:
    """Read the error, in case every caller was cancelled."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()


def assemble_batch(
    url: str, batch: PlannedBatch, *, dp_rank: int, dp_world_size: int
) -> list[EncodedMiniBatch]:
    """Return one rank's share of every mini-batch of a plan: the very bytes that a Get returns."""
    ranks = {"dp_rank": dp_rank, "dp_world_size": dp_world_size}
    num_mini_batches = len(batch.manifest.mini_batches)
    with contextlib.closing(PayloadReader(url)) as reader:
        return [_assemble(batch, reader, index, **ranks) for index in range(num_mini_batches)]


def read_share(
    url: str, run: str, step: int, *, mini_batch: int, dp_rank: int, dp_world_size: int
) -> EncodedMiniBatch:
    """Return one rank's share of one mini-batch with at most MAX_SHARE_BYTES of payload."""
    batch = read_planned_batch(url, run, step)
    num_mini_batches = len(batch.manifest.mini_batches)
    if mini_batch >= num_mini_batches:
        raise RunNotFoundError(
            f"run {run!r}: step {step} has {num_mini_batches} mini-batches, and none of the index "
            f"{mini_batch}"
        )
    _check_payload(url, run, batch, mini_batch)
    ranks = {"dp_rank": dp_rank, "dp_world_size": dp_world_size}
    with contextlib.closing(PayloadReader(url)) as reader:
        try:
            return _assemble(batch, reader, mini_batch, **ranks)
        except DamagedPayloadError:
            read_planned_batch(url, run, step)  # it may be released by now
            raise


def _check_payload(url: str, run: str, batch: PlannedBatch, index: int) -> None:
    """Refuse a mini-batch whose assembly needs more memory than a request may have."""
    plan = batch.manifest.mini_batches[index]
    groups = batch.manifest.groups[plan.first_group : plan.first_group + plan.num_groups]
    ids = [keys.trajectory_id(each.key) for group in groups for each in group.trajectories]
    with connect(url) as client, translating():
        held: Any = client.hmget(keys.run_keys(open_run(client, run)).payload_bytes, ids)
    num_bytes = sum(int(each) for each in held if each is not None and each.isdigit())
    if num_bytes > MAX_SHARE_BYTES:
        raise InvalidConfigError(
            "index",
            f"mini-batch {index} of step {batch.manifest.step} has {num_bytes} bytes of payload, "
            f"and a response has at most {MAX_SHARE_BYTES}: get it with `run.batches()`, or use "
            "fewer mini_batch_groups",
        )


def _assemble(
    batch: PlannedBatch, reader: PayloadReader, index: int, *, dp_rank: int, dp_world_size: int
) -> EncodedMiniBatch:
    check_assembly_version(batch.manifest)
    rows = build_rows(batch, reader, mini_batch=index)
    cut = cut_mini_batch(batch, rows, dp_world_size=dp_world_size)
    return encode_share(batch, rows, cut, mini_batch=index, dp_rank=dp_rank)


def read_planned_batch(url: str, run: str, step: int) -> PlannedBatch:
    """Return the plan of a retained step with the config that it was made under."""
    with connect(url) as client:
        run = open_run(client, run)
        frontier = read_frontier(client, run)
        if step <= frontier.released:
            raise not_retained(step, frontier)
        stored = read_plan(client, run, step)
        if stored is None:
            raise NotReadyError(f"run {run!r}: step {step} is not planned; {frontier.planned} are")
        text = stored_config(client, run, stored.manifest.config_revision)
    config = decode_config(text, run=run)
    return PlannedBatch(manifest=stored.manifest, manifest_hash=stored.hash, config=config)
