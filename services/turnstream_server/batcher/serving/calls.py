"""The servicer as gRPC calls it: requests parsed and checked, errors as statuses, one log line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from turnstream.errors import InvalidConfigError, TurnstreamError
from turnstream.records.statuses import error_to_status
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.serving.requests import parse_request
from turnstream_server.batcher.serving.servicer import SERVICE, BatchesServicer, answer_within_s

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


def handlers(servicer: BatchesServicer) -> grpc.GenericRpcHandler:
    """Return the handlers of all calls. Payload passes through without a message class."""
    unary: dict[str, tuple[Callable[[Any], Awaitable[Message]], type[Message]]] = {
        "Start": (servicer.start, wire.StartRequest),
        "Stepped": (servicer.stepped, wire.SteppedRequest),
        "Committed": (servicer.committed, wire.CommittedRequest),
        "AnnounceVersion": (servicer.announce_version, wire.AnnounceVersionRequest),
        "Observe": (servicer.observe, wire.ObserveRequest),
        "Observed": (servicer.observed, wire.ObservedRequest),
    }
    calls = {name: _unary(*each, servicer=servicer) for name, each in unary.items()}
    calls["Get"] = _get(servicer)
    return grpc.method_handlers_generic_handler(SERVICE, calls)


def _unary(
    method: Callable[[Any], Awaitable[Message]],
    kind: type[Message],
    *,
    servicer: BatchesServicer,
) -> Any:
    async def answer(data: bytes, context: Context) -> bytes:
        within_s = answer_within_s(context.time_remaining())
        with servicer.answering():
            async with refusing(context, call=kind.DESCRIPTOR.name):
                request = parse_request(data, kind)
                async with servicer.bounded_by_store(within_s):
                    return (await method(request)).SerializeToString()
        raise AssertionError("unreachable: an aborted call raises")

    return grpc.unary_unary_rpc_method_handler(answer)


def _get(servicer: BatchesServicer) -> Any:
    async def answer(data: bytes, context: Context) -> None:
        with servicer.answering():
            async with refusing(context, call="GetRequest"):
                request = parse_request(data, wire.GetRequest)
                async with contextlib.aclosing(servicer.get(request)) as messages:
                    await _send(messages, request, context)

    return grpc.unary_stream_rpc_method_handler(answer)


async def _send(messages: AsyncIterator[bytes], request: wire.GetRequest, context: Context) -> None:
    """Send messages until the caller ends the call: then a write fails or is cancelled."""
    async for message in messages:
        try:
            await context.write(message)
        except (grpc.aio.InternalError, asyncio.CancelledError) as error:
            logger.info(
                "dp_rank %d ended its Get of step %d of run %s before its last byte",
                request.dp_rank,
                request.step,
                request.run,
            )
            if isinstance(error, asyncio.CancelledError):
                raise
            return


@contextlib.asynccontextmanager
async def refusing(context: Context, *, call: str) -> AsyncIterator[None]:
    """Abort the call with the status of the error that the block raises."""
    try:
        yield
    except TurnstreamError as error:
        if isinstance(error, InvalidConfigError):
            logger.info("%s of %s is refused: %s", call, context.peer(), error)
        code, details = error_to_status(error)
        await context.abort(grpc.StatusCode[code], details)
    except Exception:
        logger.exception("%s failed", call)
        await context.abort(grpc.StatusCode.INTERNAL, "the batcher failed; its log says how")
