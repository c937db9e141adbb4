"""Models: made from a base model or a checkpoint, and described."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Final

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field, StrictBool, StrictInt, StrictStr

from turnstream.errors import BatchingError
from turnstream_server.gateway.bodies import Body, json_response
from turnstream_server.gateway.routes.training import submit_model_call
from turnstream_server.gateway.tinker.json_parts import Int64, Part, Settings, read_fields
from turnstream_server.gateway.tinker_caller import Authenticated, TinkerCaller
from turnstream_server.operations.checkpoints import CheckpointPath
from turnstream_server.operations.contents import CreateModel
from turnstream_server.operations.models import BaseModel, ModelRecord, create_model
from turnstream_server.operations.sessions import add_member

router = APIRouter()

_DEFAULT_RANK: Final = 32
_SEED_BYTES: Final = 4
_LAYERS: Final = ("train_attn", "train_mlp", "train_unembed")

_Number = Annotated[StrictInt, Field(ge=0, lt=2**31)]


class _Lora(Settings):
    rank: StrictInt = _DEFAULT_RANK
    seed: Int64 | None = None
    train_unembed: StrictBool = True
    train_mlp: StrictBool = True
    train_attn: StrictBool = True


class _Optimizer(Settings):
    type: StrictStr = "adamw"


class _NewModel(Part):
    session_id: StrictStr
    model_seq_id: _Number
    user_metadata: dict[str, Any] | None = None
    optimizer_config: _Optimizer | None = None


class _FromBase(_NewModel):
    base_model: StrictStr
    lora_config: _Lora | None = None


class _FromCheckpoint(_NewModel):
    path: StrictStr
    optimizer: StrictBool = False
    base_model: StrictStr | None = None
    weights_access_token: StrictStr | None = None


class _Loaded(Part):
    model_id: Any = None
    session_id: Any = None


class _ModelId(Part):
    model_id: StrictStr


@router.post("/create_model")
async def create(body: Body, caller: Authenticated) -> Response:
    """Make a model from a base model."""
    sent = read_fields(body, _FromBase)
    base = await caller.gateway.bases.require_served(sent.base_model)
    lora = sent.lora_config or _Lora()
    if not any(getattr(lora, name) for name in _LAYERS):
        raise BatchingError(f"lora_config: {', '.join(_LAYERS)} are all false, expected one true")
    adapter = {
        "lora_rank": _checked_rank(lora.rank if base.max_rank else 0, base),
        "lora_seed": _seed(sent) if lora.seed is None else lora.seed,
        **{name: getattr(lora, name) for name in _LAYERS},
    }
    content = CreateModel(path=None, optimizer=False)
    return await _create(caller, sent, base=base, adapter=adapter, content=content)


@router.post("/load_weights")
async def load_weights(body: Body, caller: Authenticated) -> Response:
    """Load a checkpoint into a model, or make a model from it if the call names none."""
    sent = read_fields(body, _Loaded)
    if sent.model_id is None and sent.session_id is not None:
        return await _create_from_checkpoint(caller, read_fields(body, _FromCheckpoint))
    return await submit_model_call(caller, body, route="load_weights")


@router.post("/get_info")
async def get_info(body: Body, caller: Authenticated) -> Response:
    """Return the description of a model."""
    model = await caller.model(read_fields(body, _ModelId).model_id)
    base = await caller.gateway.bases.find(model.base_model)
    tokenizer_id = base.tokenizer_id if base else ""
    data = {"model_name": model.base_model, "tokenizer_id": tokenizer_id or model.base_model}
    return json_response(
        {
            "type": "get_info",
            "model_data": data,
            "model_id": model.model_id,
            "is_lora": model.is_lora,
            "lora_rank": model.lora_rank or None,
            "model_name": model.base_model,
        }
    )


async def _create_from_checkpoint(caller: TinkerCaller, sent: _FromCheckpoint) -> Response:
    if sent.weights_access_token:
        raise BatchingError("weights_access_token is not supported: use the key of the weights")
    path = CheckpointPath.parse(sent.path)
    if path.kind != "weights":
        raise BatchingError(f"path is {sent.path!r}: training needs a checkpoint of save_weights")
    saved = await caller.shared_checkpoint(path)
    if sent.base_model not in (None, saved.base_model):
        expected = f"that of checkpoint {sent.path!r} is {saved.base_model!r}"
        raise BatchingError(f"base_model is {sent.base_model!r}, {expected}")
    base = await caller.gateway.bases.require_served(saved.base_model)
    adapter = {
        "lora_rank": _checked_rank(saved.lora_rank, base),
        "lora_seed": _seed(sent),
        **{name: getattr(saved, name) for name in _LAYERS},
    }
    content = CreateModel(path=path, optimizer=sent.optimizer)
    return await _create(caller, sent, base=base, adapter=adapter, content=content)


async def _create(
    caller: TinkerCaller,
    sent: _NewModel,
    *,
    base: BaseModel,
    adapter: Mapping[str, Any],
    content: CreateModel,
) -> Response:
    kind = (sent.optimizer_config or _Optimizer()).type
    if kind != "adamw":
        raise BatchingError(f"optimizer_config, type: {kind!r} is not supported, only 'adamw'")
    await caller.open_session(sent.session_id)
    model_id = f"{sent.session_id}:train:{sent.model_seq_id}"
    # First: a model that its session does not list would stay after the end of the session.
    await add_member(caller.client, sent.session_id, model_id)
    record = ModelRecord(
        model_id=model_id,
        base_model=base.name,
        owner=caller.owner,
        user_metadata=sent.user_metadata or {},
        **adapter,
    )
    request_id = await create_model(caller.client, record, content)
    return json_response({"request_id": str(request_id), "model_id": model_id})


def _checked_rank(rank: int, base: BaseModel) -> int:
    """Return the rank of an adapter, 0 for a whole model; BatchingError if it is not served."""
    if base.max_rank == 0 and rank:
        raise BatchingError(f"lora_rank is {rank}, but the workers of {base.name} train no adapter")
    if base.max_rank and not 1 <= rank <= base.max_rank:
        limit = f"expected 1 to {base.max_rank}, the largest rank for {base.name}"
        raise BatchingError(f"lora_config.rank is {rank}, {limit}")
    return rank


def _seed(sent: _NewModel) -> int:
    """Return a seed that follows from the id of the model: a repeated call has the same."""
    text = f"{sent.session_id}:{sent.model_seq_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_SEED_BYTES])
