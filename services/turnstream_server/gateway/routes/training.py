"""Numbered calls of models: training, optimizer steps, saving and loading."""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable
from typing import Final, Literal, get_args

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

from turnstream.errors import RunNotFoundError
from turnstream_server.gateway.bodies import IN_LOOP_BYTES, Body, LargeBody
from turnstream_server.gateway.state import DENSE_BYTES_PER_S, session_of
from turnstream_server.gateway.submitting import (
    Prepared,
    open_model,
    prepare_run_call,
    prepare_training,
    submit_call,
)
from turnstream_server.gateway.tinker.encodings import JSON, media_type_of
from turnstream_server.gateway.tinker.model_calls import read_model_call
from turnstream_server.gateway.tinker.training_calls import read_training_call
from turnstream_server.gateway.tinker_caller import Authenticated, TinkerCaller
from turnstream_server.operations.contents import (
    Content,
    ForwardBackwardRun,
    LoadWeights,
    SaveForSampler,
    encode_content,
    identity_of,
)
from turnstream_server.operations.keys import RequestId
from turnstream_server.operations.models import ModelRecord
from turnstream_server.operations.results import Failure
from turnstream_server.operations.sessions import add_member

router = APIRouter()

_Route = Literal[
    "forward_backward_run",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
]
_SUBMITTED: Final = get_args(_Route)[:-1]
"""Routes whose body is submitted as it is. `load_weights` may make a model too."""


@router.post("/forward_backward")
async def forward_backward(request: Request, body: LargeBody, caller: Authenticated) -> Response:
    """Submit a training call; with `forward_only` the gradients stay as they are."""
    return await _train(caller, body, route="forward_backward", request=request)


@router.post("/forward")
async def forward(request: Request, body: LargeBody, caller: Authenticated) -> Response:
    """Submit a call without gradients, of releases before 0.25."""
    return await _train(caller, body, route="forward", request=request)


def _submits(route: _Route) -> Callable[[bytes, TinkerCaller], Awaitable[Response]]:
    async def handle(body: Body, caller: Authenticated) -> Response:
        return await submit_model_call(caller, body, route=route)

    return handle


for _route in _SUBMITTED:
    router.post(f"/{_route}")(_submits(_route))


async def submit_model_call(caller: TinkerCaller, body: bytes, *, route: _Route) -> Response:
    """Submit a numbered call without datums."""
    call = read_model_call(body, route=route)
    model = await open_model(caller, call.model_id, number=call.seq_id)
    content = call.content
    if isinstance(content, Failure):
        prepared = Prepared(body, content)
    elif isinstance(content, ForwardBackwardRun):
        prepared = await prepare_run_call(caller, content)
    else:
        refusal = await _refusal(caller, model, content)
        prepared = Prepared(encode_content(content), refusal, identity_of(content))
    if isinstance(content, SaveForSampler) and content.sampling_session_seq_id is not None:
        session_id = session_of(call.model_id)
        sampler_id = f"{session_id}:sample:{content.sampling_session_seq_id}"
        await add_member(caller.client, session_id, sampler_id)
    return await submit_call(caller, RequestId(call.model_id, call.seq_id), route, prepared)


async def _train(
    caller: TinkerCaller,
    body: bytes,
    *,
    route: Literal["forward_backward", "forward"],
    request: Request,
) -> Response:
    content_type = request.headers.get("content-type", "")
    parsers, owner = caller.gateway.parsers, caller.owner
    read = functools.partial(read_training_call, content_type=content_type, route=route)
    if len(body) <= IN_LOOP_BYTES:  # in a thread: sparse rows have few bytes for any shape
        call = await parsers.in_thread(lambda: read(body), owner=owner)
    else:
        is_json = media_type_of(content_type) == JSON
        call = await parsers.run(read, body, owner=owner, is_json=is_json)
    model = await open_model(caller, call.model_id, number=call.seq_id)
    base = await caller.gateway.bases.known(model.base_model)
    prepare = functools.partial(prepare_training, call, body, base)
    is_large = call.is_sparse or len(body) > IN_LOOP_BYTES
    prepared = await parsers.in_thread(prepare, owner=owner) if is_large else prepare()
    kind = "forward" if call.forward_only else "forward_backward"
    if isinstance(prepared, ForwardBackwardRun):
        prepared, kind = await prepare_run_call(caller, prepared), "forward_backward_run"
    elif call.is_sparse:
        _require_dense_room(caller, len(prepared.content) - len(body))
    return await submit_call(caller, RequestId(call.model_id, call.seq_id), kind, prepared)


def _require_dense_room(caller: TinkerCaller, num_bytes: int) -> None:
    """Answer 429, after which the client sends the same call again; its number is not used up."""
    wait_s = caller.gateway.admit_dense(caller.owner, max(0, num_bytes))
    if wait_s:
        limit = f"{DENSE_BYTES_PER_S >> 20} MiB/s"
        detail = f"sparse rows of this key became more than {limit} of dense values: wait"
        raise HTTPException(429, detail, {"Retry-After": str(math.ceil(wait_s))})


async def _refusal(caller: TinkerCaller, model: ModelRecord, content: Content) -> Failure | None:
    """Return why a model cannot load a checkpoint; None if it can, and for other calls.

    An earlier call that still waits may save one of the model itself: its worker checks that.
    """
    if not isinstance(content, LoadWeights) or content.path.model_id == model.model_id:
        return None
    path = content.path
    try:
        saved = await caller.shared_checkpoint(path)
    except RunNotFoundError as error:
        return Failure(str(error), "user")
    for name in ("base_model", "lora_rank"):
        own, other = getattr(model, name), getattr(saved, name)
        if own != other:
            text = f"{name} of checkpoint {str(path)!r} is {other!r}, that of the model {own!r}"
            return Failure(text, "user")
    return None
