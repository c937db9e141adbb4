"""The unary calls of `turnstream.wire.v1.Batches`, and the handlers of both services."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import redis.asyncio
from google.protobuf.message import Message

from turnstream.errors import RunNotFoundError, StoreBehindError
from turnstream.records.configs import encode_config
from turnstream.store.client.run_ids import find_run_async
from turnstream.types import VersionAnnounced
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream.wire.v1.operations_pb2 import GetOperationsRequest
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.serving.get import BatchSender, caller_of
from turnstream_server.batcher.serving.operations import OperationSender
from turnstream_server.batcher.serving.requests import Access, observer_rights, parse_token
from turnstream_server.batcher.serving.running_calls import (
    Context,
    RunningCalls,
    bounded_by_store,
    store_time_s,
)
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.sessions.observers import declare_observer, note_observed
from turnstream_server.ledger.sessions.session_writes import TrainerRank, TrainerSession
from turnstream_server.ledger.sessions.sessions import (
    acknowledge_committed,
    acknowledge_stepped,
    announce_version,
    start_session,
)

logger = logging.getLogger(__name__)

SERVICE = "turnstream.wire.v1.Batches"
OPERATIONS_SERVICE = "turnstream.wire.v1.Operations"


def handlers(
    servicer: BatchesServicer,
    sender: BatchSender,
    operations: OperationSender,
    running: RunningCalls,
    access: Access,
) -> tuple[grpc.GenericRpcHandler, ...]:
    """Return the handlers of all calls. Payload passes through without a message class."""

    def unary(method: Callable[[Any], Awaitable[Message]], kind: type[Message]) -> Any:
        async def answer(data: bytes, context: Context) -> bytes:
            within_s = store_time_s(context.time_remaining())
            async with (
                running.answering(context, call=kind.DESCRIPTOR.name),
                access.reading(data, kind, context) as request,
                bounded_by_store(servicer.client, within_s),
            ):
                return (await method(request)).SerializeToString()
            raise AssertionError("unreachable: an aborted call raises")

        return grpc.unary_unary_rpc_method_handler(answer)

    def stream(send: Callable[[Any, Context], Awaitable[None]], kind: type[Message]) -> Any:
        async def answer(data: bytes, context: Context) -> None:
            async with (
                running.answering(context, call=kind.DESCRIPTOR.name),
                access.reading(data, kind, context) as request,
            ):
                await send(request, context)

        return grpc.unary_stream_rpc_method_handler(answer)

    batches = {
        "Start": unary(servicer.start, wire.StartRequest),
        "Get": stream(sender.send, wire.GetRequest),
        "Stepped": unary(servicer.stepped, wire.SteppedRequest),
        "Committed": unary(servicer.committed, wire.CommittedRequest),
        "AnnounceVersion": unary(servicer.announce_version, wire.AnnounceVersionRequest),
        "Observe": unary(servicer.observe, wire.ObserveRequest),
        "Observed": unary(servicer.observed, wire.ObservedRequest),
    }
    get_operations = stream(operations.send, GetOperationsRequest)
    return (
        grpc.method_handlers_generic_handler(SERVICE, batches),
        grpc.method_handlers_generic_handler(OPERATIONS_SERVICE, {"Get": get_operations}),
    )


class BatchesServicer:
    """The unary calls, in terms of values and errors of this package."""

    def __init__(
        self, client: redis.asyncio.Redis, find_run: Callable[[str], Awaitable[RunView]]
    ) -> None:
        self.client = client
        self._find_run = find_run

    async def start(self, request: wire.StartRequest) -> wire.StartReply:
        """Begin a trainer session."""
        token = parse_token(request.recovery_token) if request.recovery_token else None
        run = await find_run_async(self.client, request.run)
        try:
            view = await self._find_run(run)
        except RunNotFoundError as error:
            if token is None or not token.step:
                raise
            raise StoreBehindError(
                f"the token names step {token.step} of run {request.run!r}, "
                "but this store has no run of that name"
            ) from error
        failpoint("session.before_start")
        session = await start_session(
            self.client,
            run,
            session=request.session,
            dp_world_size=request.dp_world_size,
            token=token,
        )
        failpoint("session.after_start")
        _log_start(request, session, run)
        await view.refresh()
        _, config = await view.newest_config()
        return wire.StartReply(
            session_epoch=session.session_epoch,
            next_step=session.next_step,
            config_json=encode_config(config),
            lineage=session.lineage,
            newest_version=session.newest_version,
            run=run,
        )

    async def observe(self, request: wire.ObserveRequest) -> wire.ObserveReply:
        """Declare an observer."""
        run = await find_run_async(self.client, request.run)
        view = await self._find_run(run)
        declared = await declare_observer(
            self.client,
            run,
            observer=request.observer,
            first_step=request.first_step or None,
            expiry_s=request.expiry_s,
            **observer_rights(),
        )
        _, config = await view.newest_config()
        next_step = declared.next_step
        logger.info("observer %r of run %s begins at step %d", request.observer, run, next_step)
        return wire.ObserveReply(
            next_step=next_step,
            config_json=encode_config(config),
            lineage=(await view.refresh()).lineage,
            first_missed=declared.first_missed,
            run=run,
        )

    async def observed(self, request: wire.ObservedRequest) -> wire.ObservedReply:
        """Record the newest step that an observer has seen."""
        await note_observed(
            self.client,
            request.run,
            observer=request.observer,
            seen=request.step,
            **observer_rights(),
        )
        return wire.ObservedReply()

    async def stepped(self, request: wire.SteppedRequest) -> wire.SteppedReply:
        """Record that the optimizer took a step."""
        failpoint("stepped.before")
        token, version_before = await acknowledge_stepped(
            self.client,
            request.run,
            caller_of(request),
            step=request.step,
            manifest_hash=request.manifest_hash,
        )
        failpoint("stepped.after")
        return wire.SteppedReply(recovery_token=str(token), version_before=version_before)

    async def committed(self, request: wire.CommittedRequest) -> wire.CommittedReply:
        """Record that a checkpoint is on disk."""
        failpoint("committed.before")
        token = parse_token(request.recovery_token)
        await acknowledge_committed(self.client, request.run, caller_of(request), token)
        failpoint("committed.after")
        return wire.CommittedReply()

    async def announce_version(
        self, request: wire.AnnounceVersionRequest
    ) -> wire.AnnounceVersionReply:
        """Announce new weights, in the store's current lineage."""
        announced = VersionAnnounced(
            version=request.version,
            step=request.step,
            lineage="",
            weights_uri=request.weights_uri,
        )
        caller = TrainerRank(request.session_epoch, request.session)
        await announce_version(self.client, request.run, caller, announced)
        return wire.AnnounceVersionReply()


def _log_start(request: wire.StartRequest, session: TrainerSession, run: str) -> None:
    name, returning = request.session, list(session.returning_steps)
    logger.info("trainer session %r of run %s begins at step %d", name, run, session.next_step)
    if session.is_rollback:
        logger.warning(
            "run %s goes back behind committed step %d; steps %s come again",
            run,
            session.previous_committed,
            returning,
        )
    elif returning:
        logger.info("run %s: steps %s were not committed and come again", run, returning)
