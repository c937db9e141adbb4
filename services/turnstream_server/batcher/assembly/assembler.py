"""Assembly of a planned batch to the encoded share of one rank.

It runs in threads of its own, so the event loop is free. Results are cached::

    rows of a mini-batch           when the leader checks the plan, or at the first Get
    cut for a world size           at the first Get of any rank
    share of (rank, world size)    at the first Get
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

from turnstream.records.batches import EncodedMiniBatch
from turnstream.types import Rows
from turnstream_server.batcher.assembly.cache import SingleFlightCache, Sized
from turnstream_server.batcher.assembly.payload import Damage, DamagedPayloadError, PayloadReader
from turnstream_server.batcher.assembly.rows import build_rows, check_assembly_version, num_bytes_of
from turnstream_server.batcher.assembly.shares import (
    Cut,
    PlannedBatch,
    cut_mini_batch,
    encode_share,
)

NUM_THREADS: Final = min(4, max(1, (os.cpu_count() or 1) // 2))
"""They share one interpreter lock with the event loop, so that more of them mostly wait. On two
cores a second one makes the first batch wait for the check of the second, by 40 ms."""

Result = TypeVar("Result")


class _RowsKey(NamedTuple):
    run: str
    step: int
    manifest_hash: str
    mini_batch: int


class _CutKey(NamedTuple):
    source: _RowsKey
    dp_world_size: int


class _ShareKey(NamedTuple):
    source: _RowsKey
    dp_rank: int
    dp_world_size: int


_Key = _RowsKey | _CutKey | _ShareKey


class Assembler:
    """Makes the shares of planned batches, with a cache of limited bytes.

    Args:
        url: address of the store.
        max_cache_bytes: limit of the memory of kept rows, cuts and shares.
    """

    def __init__(self, url: str, *, max_cache_bytes: int) -> None:
        self._payload = PayloadReader(url)
        self._cache: SingleFlightCache[_Key, Any] = SingleFlightCache(max_bytes=max_cache_bytes)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="assembler")

    async def check(self, batch: PlannedBatch) -> None:
        """Fetch and check all payload of a batch and keep its rows for the first Get.

        Raises:
            DamagedPayloadError: names trajectories that cannot be trained.
        """
        for mini_batch in range(len(batch.manifest.mini_batches)):
            await self._rows(batch, mini_batch)

    async def examine(self, batch: PlannedBatch) -> tuple[Damage, ...]:
        """Return the damaged payload of a batch, read from the store and not from the cache.

        Raises:
            UnknownFormatError: the batch has the assembly rules of another release.
        """
        check_assembly_version(batch.manifest)
        damages: list[Damage] = []
        for mini_batch in range(len(batch.manifest.mini_batches)):
            try:
                await self.in_thread(functools.partial(self._build_rows, batch, mini_batch))
            except DamagedPayloadError as error:
                damages += error.damages
        return tuple(damages)

    async def share(
        self, batch: PlannedBatch, *, mini_batch: int, dp_rank: int, dp_world_size: int
    ) -> EncodedMiniBatch:
        """Return one rank's share of a mini-batch; the same arguments give the same bytes.

        Raises:
            DamagedPayloadError: payload was damaged after the batch was planned.
            UnknownFormatError: the batch has the assembly rules of another release.
        """
        key = _ShareKey(_rows_key(batch, mini_batch), dp_rank, dp_world_size)
        return await self._cache.get(key, self._share_maker(batch, key))

    def prepare(
        self, batch: PlannedBatch, *, mini_batch: int, dp_rank: int, dp_world_size: int
    ) -> None:
        """Begin to make a share that will be requested soon."""
        key = _ShareKey(_rows_key(batch, mini_batch), dp_rank, dp_world_size)
        self._cache.prepare(key, self._share_maker(batch, key))

    def release(self, run: str, *, through_step: int) -> None:
        """Drop the cached values of the steps of a run up to this one."""

        def is_stepped(key: _Key) -> bool:
            source = key if isinstance(key, _RowsKey) else key.source
            return source.run == run and source.step <= through_step

        self._cache.drop(is_stepped)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run a function in one of the threads, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def close(self) -> None:
        """Stop, once the running functions have returned."""
        await self._cache.close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._payload.close()

    def _share_maker(
        self, batch: PlannedBatch, key: _ShareKey
    ) -> Callable[[], Awaitable[Sized[EncodedMiniBatch]]]:
        async def make() -> Sized[EncodedMiniBatch]:
            check_assembly_version(batch.manifest)
            mini_batch = key.source.mini_batch
            rows = await self._rows(batch, mini_batch)
            cut = await self._cut(batch, rows, _CutKey(key.source, key.dp_world_size))
            share = await self.in_thread(
                lambda: encode_share(batch, rows, cut, mini_batch=mini_batch, dp_rank=key.dp_rank)
            )
            return Sized(share, share.num_bytes)

        return make

    async def _cut(self, batch: PlannedBatch, rows: Rows, key: _CutKey) -> Cut:
        async def make() -> Sized[Cut]:
            divide = functools.partial(cut_mini_batch, batch, rows, dp_world_size=key.dp_world_size)
            cut = await self.in_thread(divide)
            return Sized(cut, cut.num_bytes)

        return await self._cache.get(key, make)

    async def _rows(self, batch: PlannedBatch, mini_batch: int) -> Rows:
        async def make() -> Sized[Rows]:
            rows = await self.in_thread(lambda: self._build_rows(batch, mini_batch))
            return Sized(rows, num_bytes_of(rows))

        return await self._cache.get(_rows_key(batch, mini_batch), make)

    def _build_rows(self, batch: PlannedBatch, mini_batch: int) -> Rows:
        return build_rows(batch, self._payload, mini_batch=mini_batch)


def _rows_key(batch: PlannedBatch, mini_batch: int) -> _RowsKey:
    manifest = batch.manifest
    return _RowsKey(manifest.run, manifest.step, batch.manifest_hash, mini_batch)
