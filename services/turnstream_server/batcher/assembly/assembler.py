"""Assembly of a planned batch to the encoded share of one rank.

It runs in threads of its own, so the event loop is free. Results are cached::

    rows of a mini-batch           when the leader checks the plan, or at the first Get
    cut for a world size           at the first Get of any rank
    share of (rank, world size)    at the first Get; when every rank has its share, rows and cut go
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from turnstream.batching.merge.plan import ASSEMBLY_VERSION, GroupPlan, Manifest
from turnstream.batching.rows.assemble import assemble_rows
from turnstream.errors import BatchingError, RecordError, UnknownFormatError
from turnstream.records.batches import EncodedMiniBatch
from turnstream.types import DeclaredColumn, Ragged, Rows
from turnstream_server.batcher.assembly.cache import CacheStatistics, SingleFlightCache, Sized
from turnstream_server.batcher.assembly.payload import (
    Damage,
    DamagedPayloadError,
    Payload,
    PayloadReader,
)
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
            build = functools.partial(self._build_rows, batch, mini_batch)
            try:
                await self.in_thread(build)
            except DamagedPayloadError as error:
                damages += error.damages
        return tuple(damages)

    async def share(
        self, batch: PlannedBatch, *, mini_batch: int, dp_rank: int, dp_world_size: int
    ) -> EncodedMiniBatch:
        """One rank's share of a mini-batch; the same arguments give the same bytes.

        Raises:
            DamagedPayloadError: payload was damaged after the batch was planned.
            UnknownFormatError: the batch is to be assembled by rules of another release.
        """
        key = _ShareKey(_rows_key(batch, mini_batch), dp_rank, dp_world_size)
        share: EncodedMiniBatch = await self._cache.get(key, self._share_maker(batch, key))
        self._drop_needless_rows(key)
        return share

    def prepare(
        self, batch: PlannedBatch, *, mini_batch: int, dp_rank: int, dp_world_size: int
    ) -> None:
        """Begin to make a share that will be asked for soon."""
        key = _ShareKey(_rows_key(batch, mini_batch), dp_rank, dp_world_size)
        self._cache.prepare(key, self._share_maker(batch, key))

    def release(self, run: str, *, through_step: int) -> None:
        """Forget what was made for the steps of a run up to this one."""

        def is_over(key: _Key) -> bool:
            source = key if isinstance(key, _RowsKey) else key.source
            return source.run == run and source.step <= through_step

        self._cache.drop(is_over)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Do something in one of the threads, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def statistics(self) -> CacheStatistics:
        """Return the counts of the cache."""
        return self._cache.statistics()

    async def close(self) -> None:
        """Stop, once the threads are done with what they are at."""
        await self._cache.close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._payload.close()

    def _share_maker(
        self, batch: PlannedBatch, key: _ShareKey
    ) -> Callable[[], Awaitable[Sized[EncodedMiniBatch]]]:
        async def make() -> Sized[EncodedMiniBatch]:
            check_assembly_version(batch.manifest)
            rows = await self._rows(batch, key.source.mini_batch)
            encode = functools.partial(
                encode_share,
                batch,
                rows,
                await self._cut(batch, rows, _CutKey(key.source, key.dp_world_size)),
                mini_batch=key.source.mini_batch,
                dp_rank=key.dp_rank,
            )
            share = await self.in_thread(encode)
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
            return Sized(rows, _num_bytes(rows))

        return await self._cache.get(_rows_key(batch, mini_batch), make)

    def _build_rows(self, batch: PlannedBatch, mini_batch: int) -> Rows:
        groups = batch.groups_of(mini_batch)
        trajectories = [member for group in groups for member in group.trajectories]
        payload = self._payload.read(trajectories, run=batch.manifest.run)
        first_row_id = batch.manifest.mini_batches[mini_batch].first_row_id
        masked_versions = batch.manifest.masked_versions
        try:
            return assemble_rows(
                groups,
                payload,
                first_row_id=first_row_id,
                extra_columns=batch.config.extra_columns,
                masked_versions=masked_versions,
            )
        except (BatchingError, RecordError) as error:
            damages = _blame(
                groups,
                payload,
                error,
                extra_columns=batch.config.extra_columns,
                masked_versions=masked_versions,
            )
            raise DamagedPayloadError(damages) from error

    def _drop_needless_rows(self, made: _ShareKey) -> None:
        """Drop rows and cut that a share came from once every rank of its world has its share."""
        world = made.dp_world_size
        if not self._cache.is_kept(made.source):
            return
        # Ranks mostly ask in order. A neighbour without its share saves the check of the others.
        ranks = ((made.dp_rank - 1) % world, (made.dp_rank + 1) % world, *range(world))
        if all(self._cache.is_kept(made._replace(dp_rank=rank)) for rank in ranks):
            needless = (made.source, _CutKey(made.source, world))
            self._cache.drop(lambda key: key in needless)


def _rows_key(batch: PlannedBatch, mini_batch: int) -> _RowsKey:
    manifest = batch.manifest
    return _RowsKey(manifest.run, manifest.step, batch.manifest_hash, mini_batch)


def check_assembly_version(manifest: Manifest) -> None:
    """Make sure that this release assembles a plan as the release that made it.

    Raises:
        UnknownFormatError: it does not.
    """
    if manifest.assembly_version > ASSEMBLY_VERSION:
        raise UnknownFormatError("assembly", manifest.assembly_version, ASSEMBLY_VERSION)


def _blame(
    groups: tuple[GroupPlan, ...],
    payload: Payload,
    error: Exception,
    *,
    extra_columns: tuple[DeclaredColumn, ...],
    masked_versions: tuple[int, ...],
) -> tuple[Damage, ...]:
    """The trajectories that do not assemble alone; all of them if each does."""
    damages: list[Damage] = []
    for group in groups:
        for member in group.trajectories:
            alone = GroupPlan(
                group_id=group.group_id, prompt_uid=group.prompt_uid, trajectories=(member,)
            )
            try:
                assemble_rows(
                    [alone],
                    payload,
                    first_row_id=0,
                    extra_columns=extra_columns,
                    masked_versions=masked_versions,
                )
            except (BatchingError, RecordError) as own_error:
                damages.append(Damage(member.key, str(own_error)))
    if damages:
        return tuple(damages)
    return tuple(Damage(member.key, str(error)) for g in groups for member in g.trajectories)


def _num_bytes(rows: Rows) -> int:
    total = 0
    columns = [getattr(rows, name) for name in Rows.__slots__]
    for column in (*columns, *[extra.values for extra in rows.extras.values()]):
        if isinstance(column, Ragged):
            total += column.values.nbytes + column.offsets.nbytes
        elif isinstance(column, np.ndarray):
            total += column.nbytes
    return total
