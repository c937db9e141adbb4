"""Results of requests, fetched by long polls."""

from __future__ import annotations

import contextlib
import functools

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response
from pydantic import StrictStr

from turnstream.errors import BatchingError, UnavailableError
from turnstream_server.gateway.bodies import Body, json_response
from turnstream_server.gateway.polls import DroppedResultError, UnknownRequestError
from turnstream_server.gateway.state import session_of
from turnstream_server.gateway.tinker.encodings import Encoded, as_json
from turnstream_server.gateway.tinker.json_parts import Part, read_fields
from turnstream_server.gateway.tinker.outputs import encode_output, encode_sample
from turnstream_server.gateway.tinker_caller import Authenticated, TinkerCaller
from turnstream_server.operations.keys import RequestId, parse_request_id
from turnstream_server.operations.results import (
    Answer,
    Failure,
    TrainingOutput,
    decode_result,
    keep_fetched,
)
from turnstream_server.operations.samplers import cancel_sample

router = APIRouter()


class _Poll(Part):
    request_id: StrictStr


@router.post("/retrieve_future")
async def retrieve_future(request: Request, body: Body, caller: Authenticated) -> Response:
    """Return the result of a request.

    The status is 408 if it is still pending at the end of the poll, and 410 if it was dropped.
    """
    request_id = _request_id(body)
    try:
        stored = await caller.gateway.polls.result(
            request_id,
            hold_s=caller.gateway.options.poll_s,
            check=functools.partial(caller.require_target, request_id),
        )
    except UnknownRequestError as error:
        status = await _status_of_unknown(caller, request_id)
        raise HTTPException(status, str(error)) from error
    except DroppedResultError as error:
        raise HTTPException(410, str(error)) from error
    if stored is None:
        pending = {"type": "try_again", "request_id": str(request_id), "queue_state": "active"}
        return json_response(pending, status=408)
    encode = functools.partial(encode_stored, accept=request.headers.get("accept", ""))
    encoded = await caller.gateway.parsers.run(encode, stored, owner=caller.owner)
    with contextlib.suppress(UnavailableError):  # else it is kept for longer
        await keep_fetched(caller.client, request_id, stored)
    return Response(encoded.body, media_type=encoded.content_type)


@router.post("/cancel_future")
async def cancel_future(body: Body, caller: Authenticated) -> Response:
    """Fail a sample that has no result yet; 400 for a call of a model, which runs in its order."""
    request_id = _request_id(body)
    await caller.require_target(request_id)
    if not request_id.is_sample:
        message = f"request {str(request_id)!r} cannot be cancelled: calls of a model run in order"
        raise BatchingError(message)
    await cancel_sample(caller.client, request_id)
    return json_response({})


def encode_stored(stored: bytes, *, accept: str) -> Encoded:
    """Return the answer for the bytes of `encode_result`, as an Accept header wants it."""
    result = decode_result(stored)
    if isinstance(result, Failure):
        return as_json(result._asdict())
    try:
        if isinstance(result, Answer):
            return as_json(result.content)
        if isinstance(result, TrainingOutput):
            return encode_output(result, accept=accept)
        return encode_sample(result, accept=accept)
    except BatchingError as error:
        return as_json(Failure(str(error), "server")._asdict())


def _request_id(body: bytes) -> RequestId:
    text = read_fields(body, _Poll).request_id
    try:
        return parse_request_id(text)
    except ValueError as error:
        raise HTTPException(404, str(error)) from error


async def _status_of_unknown(caller: TinkerCaller, request_id: RequestId) -> int:
    session = await caller.session(session_of(request_id.target))
    return 410 if session.finished else 404
