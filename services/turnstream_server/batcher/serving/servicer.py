"""The calls of `turnstream.wire.v1.Batches`, in terms of values and errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final

import redis.asyncio

from turnstream.errors import (
    CorruptRecordError,
    RunNotFoundError,
    StoreBehindError,
    StoreUnavailableError,
)
from turnstream.records.configs import encode_config
from turnstream.store.client.cancellation import cancel_all
from turnstream.store.client.connection import address_of_client
from turnstream.store.client.run_ids import find_run_async
from turnstream.store.waits.awaited import store_silent
from turnstream.store.waits.bounded_call import unanswered
from turnstream.store.waits.wait_reasons import replan_hint
from turnstream.types import VersionAnnounced
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.payload import DamagedPayloadError
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.serving.chunks import data_messages, header_message
from turnstream_server.batcher.serving.request_checks import (
    check_caller,
    check_chain,
    log_start,
    note_handed,
    record_caller,
)
from turnstream_server.batcher.serving.requests import parse_token
from turnstream_server.bus.core.frontier import not_retained
from turnstream_server.bus.planning.replans import note_damage
from turnstream_server.bus.sessions.observers import declare_observer, note_observed
from turnstream_server.bus.sessions.sessions import (
    acknowledge_committed,
    acknowledge_stepped,
    start_session,
)
from turnstream_server.bus.sessions.versions import announce_version, newest_version
from turnstream_server.failpoints import reach

logger = logging.getLogger(__name__)

SERVICE = "turnstream.wire.v1.Batches"

_ANSWER_SHARE: Final = 0.2
"""Share of a caller's deadline that is kept for the answer that the store is silent."""

_LEAST_ANSWER_S: Final = 1.0
"""Time for a Get that has waited to read the reason from the store."""


class BatchesServicer:
    """The calls of the service, in terms of values and errors of this package.

    Args:
        client: client of the store.
        find_run: returns the view of a run, or raises RunNotFoundError.
        assembler: makes shares.
        wait_max_s: longest wait of a Get.
    """

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
        self._answering: set[asyncio.Task[Any]] = set()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Inside, the running task is one that `close` cancels."""
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            yield
        finally:
            self._answering.discard(task)

    async def close(self) -> None:
        """Cancel the calls that the stopped server has not cancelled yet: they use the store."""
        await cancel_all([*self._answering])

    async def start(self, request: wire.StartRequest) -> wire.StartReply:
        """Begin a trainer session."""
        token = parse_token(request.recovery_token) if request.recovery_token else None
        run = await find_run_async(self._client, request.run)
        try:
            view = await self._find_run(run)
        except RunNotFoundError as error:
            if token is None or not token.step:
                raise
            raise StoreBehindError(
                f"the token names step {token.step} of run {request.run!r}, "
                "but this store has no run of that name"
            ) from error
        reach("session.before_start")
        session = await start_session(
            self._client,
            run,
            session=request.session,
            dp_world_size=request.dp_world_size,
            token=token,
        )
        reach("session.after_start")
        log_start(request, session, run)
        frontier = await view.refresh()
        _, config = await view.newest_config()
        newest = await newest_version(self._client, run)
        floor = frontier.version_floor
        return wire.StartReply(
            session_epoch=session.session_epoch,
            next_step=session.next_step,
            config_json=encode_config(config),
            lineage=session.lineage,
            newest_version=floor if newest is None else max(floor, newest.version),
            run=run,
        )

    async def get(self, request: wire.GetRequest) -> AsyncGenerator[bytes]:
        """Yield the messages of one rank's share, mini-batch by mini-batch."""
        wait_s = min(request.wait_s, self._wait_max_s)
        answer_s = max(_LEAST_ANSWER_S, wait_s * _ANSWER_SHARE)
        async with self.bounded_by_store(wait_s + answer_s):
            view = await self._find_run(request.run)
            batch = await self._planned(view, request, wait_s=wait_s)
        try:
            async for message in self._messages(batch, request):
                yield message
        except DamagedPayloadError as error:
            frontier = await view.refresh()
            if request.step <= frontier.released:
                raise not_retained(request.step, frontier) from error
            raise await self._damaged(batch, error) from error

    async def _damaged(self, batch: PlannedBatch, error: DamagedPayloadError) -> CorruptRecordError:
        """Return the error for damaged payload, and record it in the run."""
        run, step = batch.manifest.run, batch.manifest.step
        sentence = f"step {step}: {error}"
        await note_damage(
            self._client, run, step=step, manifest_hash=batch.manifest_hash, sentence=sentence
        )
        return CorruptRecordError(f"{sentence}; {replan_hint(run)}")

    async def observe(self, request: wire.ObserveRequest) -> wire.ObserveReply:
        """Declare an observer."""
        run = await find_run_async(self._client, request.run)
        view = await self._find_run(run)
        declared = await declare_observer(
            self._client,
            run,
            observer=request.observer,
            first_step=request.first_step or None,
            expiry_s=request.expiry_s,
        )
        _, config = await view.newest_config()
        name, first = request.observer, declared.next_step
        logger.info("observer %r of run %s begins at step %d", name, run, first)
        return wire.ObserveReply(
            next_step=declared.next_step,
            config_json=encode_config(config),
            lineage=(await view.refresh()).lineage,
            first_missed=declared.first_missed,
            run=run,
        )

    async def observed(self, request: wire.ObservedRequest) -> wire.ObservedReply:
        """Record the newest step that an observer has seen."""
        await note_observed(self._client, request.run, observer=request.observer, seen=request.step)
        return wire.ObservedReply()

    async def stepped(self, request: wire.SteppedRequest) -> wire.SteppedReply:
        """Record that the optimizer took a step."""
        reach("stepped.before")
        token = await acknowledge_stepped(
            self._client,
            request.run,
            session_epoch=request.session_epoch,
            step=request.step,
            manifest_hash=request.manifest_hash,
            session=request.session,
            dp_rank=request.dp_rank if request.HasField("dp_rank") else None,
        )
        reach("stepped.after")
        return wire.SteppedReply(recovery_token=str(token))

    async def committed(self, request: wire.CommittedRequest) -> wire.CommittedReply:
        """Record that a checkpoint is on disk."""
        reach("committed.before")
        await acknowledge_committed(
            self._client,
            request.run,
            session_epoch=request.session_epoch,
            token=parse_token(request.recovery_token),
            session=request.session,
            dp_rank=request.dp_rank if request.HasField("dp_rank") else None,
        )
        reach("committed.after")
        return wire.CommittedReply()

    async def announce_version(
        self, request: wire.AnnounceVersionRequest
    ) -> wire.AnnounceVersionReply:
        """Announce new weights, in the store's current lineage.

        The view may lack a session that another replica has just started.
        """
        view = await self._find_run(request.run)
        announced = VersionAnnounced(
            version=request.version,
            step=request.step,
            lineage=(await view.refresh()).lineage,
            weights_uri=request.weights_uri,
        )
        await announce_version(
            self._client,
            request.run,
            announced,
            session_epoch=request.session_epoch,
            session=request.session,
        )
        return wire.AnnounceVersionReply()

    @contextlib.asynccontextmanager
    async def bounded_by_store(self, within_s: float | None) -> AsyncIterator[None]:
        """Limit the waits for a silent store inside the block.

        Raises:
            StoreUnavailableError: the store is silent or cannot be reached.
        """
        address, began_s = address_of_client(self._client), time.monotonic()
        try:
            async with asyncio.timeout(within_s):
                yield
        except TimeoutError as error:
            silent = store_silent(address=address, since_s=time.monotonic() - began_s)
            raise StoreUnavailableError(silent.sentence, [silent]) from error
        except StoreUnavailableError as error:
            since_s = time.monotonic() - began_s
            why = error.reasons or [unanswered(error, address=address, since_s=since_s)]
            raise StoreUnavailableError(error.message, why, error.retry_after_s) from error

    async def _planned(
        self, view: RunView, request: wire.GetRequest, *, wait_s: float
    ) -> PlannedBatch:
        """Return the requested batch, and record which batches the rank has and gets.

        A step is acknowledged only if all ranks are recorded to have it from the same manifest.
        """
        await record_caller(self._client, request)
        try:
            batch = await view.wait_for_batch(
                request.step,
                check=lambda frontier: check_caller(request, frontier),
                wait_s=min(wait_s, await self._longest_wait_s(request)),
            )
            check_chain(request, batch)
        except StoreBehindError:
            await record_caller(self._client, request)  # the other ranks get the error, too
            raise
        await note_handed(self._client, request, batch)
        return batch

    async def _longest_wait_s(self, request: wire.GetRequest) -> float:
        """Return the longest wait of a Get; an observer calls again before it expires."""
        if not request.observer:
            return self._wait_max_s
        expiry_s = await note_observed(
            self._client, request.run, observer=request.observer, asks=request.step
        )
        return min(self._wait_max_s, expiry_s / 3)

    async def _messages(
        self, batch: PlannedBatch, request: wire.GetRequest
    ) -> AsyncIterator[bytes]:
        whose = {"dp_rank": request.dp_rank, "dp_world_size": request.dp_world_size}
        num_mini_batches = len(batch.manifest.mini_batches)
        for mini_batch in range(num_mini_batches):
            share = await self._assembler.share(batch, mini_batch=mini_batch, **whose)
            if mini_batch + 1 < num_mini_batches:  # made while this one is sent
                self._assembler.prepare(batch, mini_batch=mini_batch + 1, **whose)
            yield header_message(
                share,
                step=batch.manifest.step,
                mini_batch=mini_batch,
                num_mini_batches=num_mini_batches,
            )
            reach("get.after_header")
            for message in data_messages(share.data):
                yield message
            reach("get.after_data")


def answer_within_s(left_s: float | None) -> float | None:
    """Return the seconds that the store has for its answer, of those that a caller has left."""
    return None if left_s is None else left_s * (1 - _ANSWER_SHARE)
