"""Numbered calls of a model on their way to its log. A refused call uses up its number."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

from fastapi.responses import Response

from turnstream.batching.rows.operations import Operation
from turnstream.errors import BatchingError, RecordError, RunNotFoundError
from turnstream.store.client.run_ids import find_run_async
from turnstream_server.failpoints import failpoint
from turnstream_server.gateway.bodies import json_response
from turnstream_server.gateway.limits import check_operation_limits
from turnstream_server.gateway.state import session_of
from turnstream_server.gateway.tinker.loss_inputs import TrainingCall
from turnstream_server.gateway.tinker_caller import TinkerCaller
from turnstream_server.ledger.core.frontier import read_frontier_async
from turnstream_server.operations.contents import (
    ForwardBackwardRun,
    OperationKind,
    encode_content,
)
from turnstream_server.operations.keys import RequestId
from turnstream_server.operations.log import submit
from turnstream_server.operations.models import BaseModel, ModelRecord
from turnstream_server.operations.operation_records import encode_operation
from turnstream_server.operations.results import Failure, value_or_failure
from turnstream_server.telemetry.instruments import counter

_OPERATIONS = counter(
    "turnstream_gateway_commands", "Calls of hosted models that were submitted.", ["kind"]
)

_MAX_NUMBER: Final = 2**31 - 1
"""The largest number of the protobuf encoding."""


class Prepared(NamedTuple):
    """A call that can be submitted; `content` is its body if it cannot be read."""

    content: bytes
    refusal: Failure | None = None
    identity: bytes | None = None


async def open_model(caller: TinkerCaller, model_id: str, *, number: int) -> ModelRecord:
    """Return the model of a call, whose session is open; RecordError if no call has the number."""
    if number > _MAX_NUMBER:
        raise RecordError(f"seq_id is {number}, expected {_MAX_NUMBER} at most")
    record = await caller.model(model_id)
    await caller.open_session(session_of(model_id))
    return record


async def submit_call(
    caller: TinkerCaller, request_id: RequestId, kind: OperationKind, prepared: Prepared
) -> Response:
    """Submit a call, and return the answer with its request id at once."""
    model_id, number = request_id
    content, refusal, identity = prepared
    client = caller.client
    await submit(client, model_id, number, kind, content, identity=identity, refusal=refusal)
    _OPERATIONS.labels(kind).inc()
    failpoint("gateway.after_submit")
    return json_response({"request_id": str(request_id), "model_id": model_id})


def prepare_training(
    call: TrainingCall, body: bytes, base: BaseModel
) -> Prepared | ForwardBackwardRun:
    """Return a training call as an operation, or refused; or the call on a run."""
    operation = call.operation
    if isinstance(operation, ForwardBackwardRun):
        if not call.forward_only:
            return operation
        message = f"forward on run {operation.run!r} is not supported, only forward_backward"
        operation = Failure(message, "user")
    if isinstance(operation, Operation):
        operation = value_or_failure(functools.partial(check_operation_limits, operation, base))
    if isinstance(operation, Failure):
        return Prepared(body, operation)
    return Prepared(encode_operation(operation))


async def prepare_run_call(caller: TinkerCaller, content: ForwardBackwardRun) -> Prepared:
    """Return a call on the run that has the name now; refused if there is none.

    A repeated call is the same one, also if another run has the name by then.
    """
    caller.key.require("train", run=content.run)
    identity, refusal = encode_content(content), None
    try:
        run = await find_run_async(caller.client, content.run)
        content = content._replace(run=str(run))
        await read_frontier_async(caller.client, run)
    except (RunNotFoundError, BatchingError) as error:
        refusal = Failure(str(error), "user")
    return Prepared(encode_content(content), refusal, identity)
