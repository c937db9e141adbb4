"""The calls of `turnstream.wire.v1.Operations`: shares of the training calls of hosted models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final, NamedTuple

import redis.asyncio

from turnstream.errors import ReleasedError
from turnstream.records.batches import with_sha256
from turnstream.wire.v1 import operations_pb2 as wire
from turnstream_server.batcher.assembly.assembler import SingleFlightCache
from turnstream_server.batcher.assembly.operation_shares import (
    OperationPasses,
    cut_operations,
    encode_operation_share,
    num_bytes_of_passes,
)
from turnstream_server.batcher.serving.get import data_messages
from turnstream_server.batcher.serving.running_calls import (
    Context,
    bounded_by_store,
    write_messages,
)
from turnstream_server.failpoints import failpoint
from turnstream_server.interpreter import return_free_memory
from turnstream_server.operations.log import read_bodies

MAX_CACHE_BYTES: Final = 256 << 20
"""Limit of the rows in memory: ranks of a worker call within a short time of each other."""

READ_S: Final = 10.0
"""Longest wait for the contents of commands, which all ranks of a worker share."""

_QUIET_S: Final = 5.0
"""Time after the last share until free memory returns to the system."""


class _Key(NamedTuple):
    """The arguments that all ranks of a worker have in common."""

    model_id: str
    first: int
    last: int
    skipped: frozenset[int]
    dp_world_size: int

    @property
    def numbers(self) -> list[int]:
        """Numbers of the commands that take part."""
        return [each for each in range(self.first, self.last + 1) if each not in self.skipped]


class _Cut(NamedTuple):
    """Passes, and the ranks that have received their shares of all of them."""

    operations: OperationPasses
    served: set[int]


class OperationSender:
    """Answers Get. Rows are made once for all ranks, in threads, and dropped after the last one."""

    def __init__(self, client: redis.asyncio.Redis, *, max_cache_bytes: int) -> None:
        self._client = client
        self._cache = SingleFlightCache[_Key, _Cut](
            lambda cut: num_bytes_of_passes(cut.operations),
            max_bytes=min(max_cache_bytes, MAX_CACHE_BYTES),
        )
        self._release: asyncio.TimerHandle | None = None

    async def send(self, request: wire.GetOperationsRequest, context: Context) -> None:
        """Send the share of every pass, until the caller ends the call."""
        end = (
            f"dp_rank {request.dp_rank} ended its Get of commands {request.first} to "
            f"{request.last} of model {request.model_id}"
        )
        await write_messages(self._messages(request), context, end_of_caller=end)

    async def close(self) -> None:
        """Stop to make rows, and drop all others."""
        if self._release is not None:
            self._release.cancel()
        await self._cache.close()

    async def _messages(self, request: wire.GetOperationsRequest) -> AsyncGenerator[bytes]:
        key = _Key(
            request.model_id,
            request.first,
            request.last,
            frozenset(request.skipped),
            request.dp_world_size,
        )
        operations, served = await self._cache.get(key, lambda: self._cut(key))
        for index, own in enumerate(operations.passes):
            share = await asyncio.to_thread(
                encode_operation_share, operations, index=index, dp_rank=request.dp_rank
            )
            if not request.reads_xxh3:
                share = await asyncio.to_thread(with_sha256, share)
            header = wire.OperationShareHeader(
                index=index,
                num_shares=len(operations.passes),
                loss=own.loss,
                settings=own.settings,
                num_bytes=share.num_bytes,
                content_hash=share.content_hash,
            )
            yield wire.OperationChunk(header=header).SerializeToString(deterministic=True)
            failpoint("operations.after_header")
            for message in data_messages(share.data, field=wire.OperationChunk.DATA_FIELD_NUMBER):
                yield message
            failpoint("operations.after_data")
        served.add(request.dp_rank)
        if len(served) == key.dp_world_size:
            self._cache.drop(lambda each: each == key)
        self._release_later()

    def _release_later(self) -> None:
        if self._release is not None:
            self._release.cancel()
        loop = asyncio.get_running_loop()
        self._release = loop.call_later(_QUIET_S, loop.run_in_executor, None, return_free_memory)

    async def _cut(self, key: _Key) -> _Cut:
        async with bounded_by_store(self._client, READ_S):
            bodies = await read_bodies(self._client, key.model_id, key.numbers)
        for number in key.numbers:
            if number not in bodies:
                raise ReleasedError(
                    f"command {number} of model {key.model_id!r} has no content: it was refused, "
                    "or a checkpoint covers it"
                )
        operations = await asyncio.to_thread(
            cut_operations,
            key.model_id,
            bodies,
            first=key.first,
            dp_world_size=key.dp_world_size,
        )
        return _Cut(operations, set())
