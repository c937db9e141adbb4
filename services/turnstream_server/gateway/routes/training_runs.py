"""Models and saved checkpoints of a key: listed, deleted, published, and with another expiry."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

from fastapi import APIRouter, HTTPException
from fastapi.responses import Response
from pydantic import Field, StrictInt, StrictStr

from turnstream.errors import BatchingError
from turnstream_server.gateway.bodies import Body, json_response
from turnstream_server.gateway.descriptions import (
    Limit,
    Offset,
    cursor,
    describe_checkpoint,
    describe_model,
    timestamp,
)
from turnstream_server.gateway.tinker.json_parts import Part, read_fields
from turnstream_server.gateway.tinker_caller import Authenticated, TinkerCaller
from turnstream_server.operations.checkpoints import (
    CheckpointPath,
    delete_checkpoint,
    write_checkpoint,
)
from turnstream_server.operations.models import models_of_owner, read_model_async

router = APIRouter()

_CHECKPOINT: Final = "/training_runs/{model_id}/checkpoints/{kind}/{name}"
_LEAST_TTL_S: Final = 3_600
_MOST_TTL_S: Final = 10 * 365 * 24 * 3_600


class _Expiry(Part):
    ttl_seconds: Annotated[StrictInt, Field(ge=_LEAST_TTL_S, le=_MOST_TTL_S)] | None


class _Path(Part):
    tinker_path: StrictStr


@router.get("/training_runs")
async def list_runs(caller: Authenticated, limit: Limit = 20, offset: Offset = 0) -> Response:
    """Return a page of the caller's models, the newest first."""
    client, owner = caller.client, caller.owner
    models, total = await models_of_owner(client, owner, offset=offset, limit=limit)
    saved = await caller.checkpoints()
    runs = [describe_model(each, saved) for each in models]
    place = cursor(offset=offset, limit=limit, total=total)
    return json_response({"training_runs": runs, "cursor": place})


@router.get("/training_runs/{model_id}")
async def describe_run(model_id: str, caller: Authenticated) -> Response:
    """Return a model."""
    await caller.model(model_id)
    model = await read_model_async(caller.client, model_id)
    saved = await caller.checkpoints(model_id)
    return json_response(describe_model(model, saved))


@router.get("/training_runs/{model_id}/checkpoints")
async def list_checkpoints_of_run(model_id: str, caller: Authenticated) -> Response:
    """Return the checkpoints of a model, the newest first."""
    await caller.model(model_id)
    saved = await caller.checkpoints(model_id)
    return json_response({"checkpoints": [describe_checkpoint(each) for each in reversed(saved)]})


@router.get("/checkpoints")
async def list_checkpoints(
    caller: Authenticated, limit: Limit = 100, offset: Offset = 0
) -> Response:
    """Return a page of the caller's checkpoints, the newest first."""
    saved = await caller.checkpoints()
    page = saved[::-1][offset : offset + limit]
    place = cursor(offset=offset, limit=limit, total=len(saved))
    shown = [describe_checkpoint(each) for each in page]
    return json_response({"checkpoints": shown, "cursor": place})


@router.delete(_CHECKPOINT)
async def delete(model_id: str, kind: str, name: str, caller: Authenticated) -> Response:
    """Delete a checkpoint."""
    path = _path(model_id, kind, name)
    threads = caller.gateway.threads
    await threads.run(lambda client: delete_checkpoint(client, caller.owner, path))
    return Response(status_code=204)


@router.put(f"{_CHECKPOINT}/ttl")
async def set_ttl(
    model_id: str, kind: str, name: str, body: Body, caller: Authenticated
) -> Response:
    """Set the seconds until a checkpoint is deleted; null keeps it."""
    ttl_s = read_fields(body, _Expiry).ttl_seconds
    expires_ms = None if ttl_s is None else round((time.time() + ttl_s) * 1000)
    await _change(caller, _path(model_id, kind, name), expires_ms=expires_ms)
    return json_response({"expires_at": None if expires_ms is None else timestamp(expires_ms)})


@router.post(f"{_CHECKPOINT}/publish")
async def publish(model_id: str, kind: str, name: str, caller: Authenticated) -> Response:
    """Let all keys load a checkpoint, and sample from it."""
    await _change(caller, _path(model_id, kind, name), public=True)
    return json_response({})


@router.delete(f"{_CHECKPOINT}/publish")
async def unpublish(model_id: str, kind: str, name: str, caller: Authenticated) -> Response:
    """Undo `publish`; weights that were loaded stay loaded."""
    await _change(caller, _path(model_id, kind, name), public=False)
    return json_response({})


@router.post("/weights_info")
async def weights_info(body: Body, caller: Authenticated) -> Response:
    """Return the settings of the model that saved a checkpoint."""
    path = CheckpointPath.parse(read_fields(body, _Path).tinker_path)
    saved = await caller.shared_checkpoint(path)
    return json_response(
        {
            "base_model": saved.base_model,
            "is_lora": saved.lora_rank > 0,
            "lora_rank": saved.lora_rank or None,
            "train_unembed": saved.train_unembed,
            "train_mlp": saved.train_mlp,
            "train_attn": saved.train_attn,
        }
    )


def _path(model_id: str, kind: str, name: str) -> CheckpointPath:
    try:
        return CheckpointPath.parse(f"tinker://{model_id}/{kind}/{name}")
    except BatchingError as error:
        raise HTTPException(404, str(error)) from error


async def _change(caller: TinkerCaller, path: CheckpointPath, **changes: Any) -> None:
    saved = (await caller.checkpoint(path))._replace(**changes)
    threads = caller.gateway.threads
    await threads.run(lambda client: write_checkpoint(client, caller.owner, saved))
