"""Get: checks of the caller, and the share of one rank of a planned batch as a stream."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Final

import redis.asyncio

from turnstream.errors import (
    ConflictError,
    CorruptRecordError,
    FencedError,
    InvalidConfigError,
    StoreBehindError,
)
from turnstream.records.batches import EncodedMiniBatch, with_sha256
from turnstream.store.waits.wait_reasons import replan_hint
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.payload import DamagedPayloadError
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.serving.requests import observer_rights
from turnstream_server.batcher.serving.running_calls import (
    Context,
    bounded_by_store,
    get_time_s,
    write_messages,
)
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.core.frontier import Frontier, not_retained
from turnstream_server.ledger.sessions.observers import note_observed
from turnstream_server.ledger.sessions.session_writes import TrainerRank, check_lost, check_session
from turnstream_server.ledger.sessions.sessions import note_damage, record_rank
from turnstream_server.telemetry.instruments import counter, histogram
from turnstream_server.telemetry.tracing import span

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 1 << 20
"""Bytes of payload in one data message. A client without options refuses 4 MiB. Measured over
loopback, a receiver needs a third less time for 1 MiB than for 2 MiB, and both ends need more below
256 KiB."""

MAX_SHARES: Final = 1 << 18
"""Mini-batches of a step times ranks: dividing so many takes about a second of a core."""

_LENGTH_DELIMITED: Final = 2

_WAIT_SECONDS = histogram(
    "turnstream_batcher_get_wait_seconds",
    "Time from a Get to its planned batch, or to the answer that there is none.",
)
_PULL_SECONDS = histogram(
    "turnstream_batcher_pull_seconds",
    "Pull latency: time from a planned batch to the last byte of one rank's share.",
)
_SENT_BYTES = counter("turnstream_batcher_sent_bytes", "Bytes of shares that were sent to ranks.")


class BatchSender:
    """Answers Get."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        find_run: Callable[[str], Awaitable[RunView]],
        assembler: Assembler,
        *,
        wait_max_s: float,
    ) -> None:
        self._client = client
        self._find_run = find_run
        self._assembler = assembler
        self._wait_max_s = wait_max_s

    async def send(self, request: wire.GetRequest, context: Context) -> None:
        """Send the share mini-batch by mini-batch, until the caller ends the call."""
        end = f"dp_rank {request.dp_rank} ended its Get of step {request.step} of run {request.run}"
        with span("get", run=request.run, step=request.step, dp_rank=request.dp_rank):
            await write_messages(self._get(request), context, end_of_caller=end)

    async def _get(self, request: wire.GetRequest) -> AsyncGenerator[bytes]:
        wait_s = min(request.wait_s, self._wait_max_s)
        with _WAIT_SECONDS.time():
            async with bounded_by_store(self._client, get_time_s(wait_s)):
                view = await self._find_run(request.run)
                wait_s = min(wait_s, await self._longest_wait_s(request))
                batch = await admit(self._client, view, request, wait_s=wait_s)
                check_number_of_shares(
                    len(batch.manifest.mini_batches), dp_world_size=request.dp_world_size
                )
        began_s, num_bytes = time.monotonic(), 0
        try:
            async for message in self._messages(batch, request):
                num_bytes += len(message)
                yield message
            _PULL_SECONDS.observe(time.monotonic() - began_s)
            _log_delivery(request, view.run, num_bytes=num_bytes)
        except DamagedPayloadError as error:
            frontier = await view.refresh()
            if request.step <= frontier.released:
                raise not_retained(request.step, frontier) from error
            raise await self._damaged(batch, error) from error
        finally:
            _SENT_BYTES.inc(num_bytes)

    async def _longest_wait_s(self, request: wire.GetRequest) -> float:
        """Return the longest wait of a Get; an observer calls again before it expires."""
        if not request.observer:
            return self._wait_max_s
        expiry_s = await note_observed(
            self._client,
            request.run,
            observer=request.observer,
            asks=request.step,
            **observer_rights(),
        )
        return min(self._wait_max_s, expiry_s / 3)

    async def _messages(
        self, batch: PlannedBatch, request: wire.GetRequest
    ) -> AsyncIterator[bytes]:
        whose = {"dp_rank": request.dp_rank, "dp_world_size": request.dp_world_size}
        num_mini_batches = len(batch.manifest.mini_batches)
        for index in range(first_mini_batch(request, num_mini_batches), num_mini_batches):
            share = await self._assembler.share(batch, mini_batch=index, **whose)
            if not request.reads_xxh3:
                share = await self._assembler.in_thread(partial(with_sha256, share))
            if index + 1 < num_mini_batches:  # made while this one is sent
                self._assembler.prepare(batch, mini_batch=index + 1, **whose)
            header = wire.MiniBatchHeader(
                step=batch.manifest.step,
                mini_batch=index,
                num_mini_batches=num_mini_batches,
                num_bytes=share.num_bytes,
                content_hash=share.content_hash,
                first_byte=first_byte(request, share),
            )
            yield wire.GetChunk(header=header).SerializeToString()
            failpoint("get.after_header")
            for message in data_messages(share.data[header.first_byte :]):
                yield message
            failpoint("get.after_data")

    async def _damaged(self, batch: PlannedBatch, error: DamagedPayloadError) -> CorruptRecordError:
        run, step = batch.manifest.run, batch.manifest.step
        sentence = f"step {step}: {error}"
        await note_damage(
            self._client, run, step=step, manifest_hash=batch.manifest_hash, sentence=sentence
        )
        return CorruptRecordError(f"{sentence}; {replan_hint(run)}")


def _log_delivery(request: wire.GetRequest, run: str, *, num_bytes: int) -> None:
    facts = {"run": run, "step": request.step, "dp_rank": request.dp_rank, "bytes": num_bytes}
    receiver = f"observer {request.observer!r}" if request.observer else "the trainer"
    logger.info("share of a batch was sent to %s", receiver, extra=facts)


def first_mini_batch(request: wire.GetRequest, num_mini_batches: int) -> int:
    """Return the first mini-batch that the caller lacks; at most the last one.

    Without the manifest of the others, the caller has none.

    >>> first_mini_batch(wire.GetRequest(first_mini_batch=2, manifest_hash="m"), 4)
    2
    >>> first_mini_batch(wire.GetRequest(first_mini_batch=2), 4)
    0
    """
    return min(request.first_mini_batch, num_mini_batches - 1) if request.manifest_hash else 0


def first_byte(request: wire.GetRequest, share: EncodedMiniBatch) -> int:
    """Return the first byte of a share that the caller lacks.

    >>> share = EncodedMiniBatch(memoryview(b"abc"), content_hash="c", num_bytes=3)
    >>> first_byte(wire.GetRequest(first_byte=2, content_hash="c"), share)
    2
    >>> first_byte(wire.GetRequest(first_byte=2, content_hash="of another plan"), share)
    0
    """
    return min(request.first_byte, share.num_bytes) * (request.content_hash == share.content_hash)


def check_number_of_shares(num_mini_batches: int, *, dp_world_size: int) -> None:
    """Refuse a step that has too many shares: a Get divides each mini-batch among all ranks.

    >>> check_number_of_shares(32, dp_world_size=8192)
    >>> check_number_of_shares(2048, dp_world_size=8192)
    Traceback (most recent call last):
    turnstream.errors.InvalidConfigError: dp_world_size: 8192 ranks x 2048 mini-batches of the \
step are 16777216 shares, at most 262144 are allowed; raise mini_batch_groups of the run
    """
    if (num_shares := num_mini_batches * dp_world_size) > MAX_SHARES:
        raise InvalidConfigError(
            "dp_world_size",
            f"{dp_world_size} ranks x {num_mini_batches} mini-batches of the step are {num_shares} "
            f"shares, at most {MAX_SHARES} are allowed; raise mini_batch_groups of the run",
        )


async def admit(
    client: redis.asyncio.Redis, view: RunView, request: wire.GetRequest, *, wait_s: float
) -> PlannedBatch:
    """Return the requested batch once it is planned, and record what the rank has and gets.

    A step is acknowledged only if all ranks are recorded to have it from the same manifest.
    """

    def record(step: int, manifest_hash: str, *, has: bool) -> Awaitable[Frontier]:
        of = {"step": step, "manifest_hash": manifest_hash, "has": has}
        return record_rank(client, request.run, caller_of(request), **of)

    has_step = request.step if request.manifest_hash else request.step - 1
    has_hash = request.manifest_hash or request.previous_hash
    record_has = partial(record, has_step, has_hash, has=True) if has_hash else None
    if request.observer:
        record_has = None
    try:
        batch = await view.wait_for_batch(
            request.step,
            read=record_has,
            check=lambda frontier: check_caller(request, frontier),
            wait_s=wait_s,
        )
        _check_chain(request, batch)
    except StoreBehindError:
        if record_has is not None:
            await record_has()  # the other ranks get the error, too
        raise
    if request.dp_world_size > 1 and not request.observer:
        await record(request.step, batch.manifest_hash, has=False)  # before the first byte
    return batch


def caller_of(
    request: wire.GetRequest | wire.SteppedRequest | wire.CommittedRequest,
) -> TrainerRank:
    """Return the rank that calls, and its session."""
    return TrainerRank(request.session_epoch, request.session, request.dp_rank)


def check_caller(request: wire.GetRequest, frontier: Frontier) -> None:
    """Refuse a rank that is neither of the current session nor of an observer."""
    if not request.observer and request.session_epoch < frontier.session_epoch:
        check_session(frontier, caller_of(request))
    if request.previous_hash and frontier.planned < request.step - 1:
        raise StoreBehindError(
            f"step {request.step - 1} was delivered from the manifest {request.previous_hash!r}, "
            f"but the newest batch of this store is {frontier.planned}"
        )
    if request.observer:
        return
    check_session(frontier, caller_of(request))
    if not request.session_epoch:
        raise FencedError("a batch needs a trainer session, and the run has none yet")
    check_lost(frontier)
    if request.dp_world_size != frontier.dp_world_size:
        raise ConflictError(
            f"the session has {frontier.dp_world_size} ranks, not {request.dp_world_size}"
        )


def _check_chain(request: wire.GetRequest, batch: PlannedBatch) -> None:
    """Refuse a caller whose batch at this place the store has lost, or has planned again."""
    own = batch.manifest_hash
    if request.manifest_hash and request.manifest_hash != own:
        raise StoreBehindError(
            f"a part of step {request.step} was delivered from the manifest "
            f"{request.manifest_hash!r}, this store has {own!r} as step {request.step}"
        )
    before = batch.manifest.previous_hash
    if request.previous_hash and request.previous_hash != before:
        raise StoreBehindError(
            f"step {request.step - 1} was delivered from the manifest {request.previous_hash!r}, "
            f"this store has {before!r} as step {request.step - 1}"
        )


def data_messages(
    data: memoryview, *, field: int = wire.GetChunk.DATA_FIELD_NUMBER
) -> Iterator[bytes]:
    """Yield `GetChunk(data=part).SerializeToString()` for each part, with one copy of each byte.

    `field` is the number of the field `data` in another message.
    """
    tag = bytes([field << 3 | _LENGTH_DELIMITED])
    for start in range(0, len(data), CHUNK_BYTES):
        part = data[start : start + CHUNK_BYTES]
        yield b"".join((tag, _varint(len(part)), part))


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
