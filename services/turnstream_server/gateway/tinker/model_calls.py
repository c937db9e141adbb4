"""The numbered calls of a model that have no datums: optimizer steps, saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from turnstream.errors import BatchingError
from turnstream_server.gateway.tinker.json_parts import Part, Settings, read_header, read_part
from turnstream_server.gateway.tinker.loss_inputs import make_run_call
from turnstream_server.operations.age import check_recipients
from turnstream_server.operations.checkpoints import CheckpointPath, checkpoint_name
from turnstream_server.operations.contents import (
    Content,
    ForwardBackwardRun,
    LoadWeights,
    OptimStep,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)
from turnstream_server.operations.results import Failure, value_or_failure

_Number = Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False)]
_Beta = Annotated[_Number, Field(lt=1)]
_Seconds = Annotated[StrictInt, Field(ge=1)]


class ModelCall(NamedTuple):
    """A numbered call of a model, from 1 on. A refused one uses up its number too."""

    model_id: str
    seq_id: int
    content: Content | Failure


class _Header(Part):
    model_id: Annotated[StrictStr, Field(min_length=1)]
    seq_id: Annotated[StrictInt, Field(ge=1)]


class _AdamParams(Settings):
    learning_rate: _Number = 1e-4
    beta1: _Beta = 0.9
    beta2: _Beta = 0.95
    eps: _Number = 1e-12
    weight_decay: _Number = 0.0
    grad_clip_norm: _Number = 0.0


class _OptimStep(Part):
    adam_params: _AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class _ForwardBackwardRun(_Header):
    model_config = ConfigDict(extra="forbid")

    run: StrictStr
    loss_fn: StrictStr = "ppo"
    loss_fn_config: dict[StrictStr, StrictFloat] | None = None


class _Save(Part):
    ttl_seconds: _Seconds | None = None
    user_metadata: dict[StrictStr, StrictStr] | None = None


class _SaveWeights(_Save):
    path: StrictStr
    overwrite: StrictBool | None = None


class _SaveForSampler(_Save):
    path: StrictStr | None = None
    sampling_session_seq_id: Annotated[StrictInt, Field(ge=0)] | None = None
    kind: Literal["snapshot", "inflight"] | None = None


class _SaveExternal(Part):
    path: StrictStr
    ttl_seconds: _Seconds | None = None
    age_encryption_recipients: Annotated[list[StrictStr], Field(max_length=10)] | None = None


class _LoadWeights(Part):
    path: StrictStr
    optimizer: StrictBool | None = None
    weights_access_token: StrictStr | None = None


def read_model_call(body: bytes, *, route: str) -> ModelCall:
    """Return the call in a JSON body of a route; RecordError if it names no model and no number."""
    content, header = read_header(body, _Header)
    decoded = value_or_failure(lambda: _DECODERS[route](content))
    return ModelCall(header.model_id, header.seq_id, decoded)


def _forward_backward_run(content: dict[str, Any]) -> ForwardBackwardRun:
    sent = read_part(content, _ForwardBackwardRun, path=["forward_backward_run"])
    return make_run_call(sent.run, loss_fn=sent.loss_fn, settings=sent.loss_fn_config or {})


def _optim_step(content: dict[str, Any]) -> OptimStep:
    sent = read_part(content, _OptimStep, path=["optim_step"])
    if sent.optimizer_params is not None:
        kind = sent.optimizer_params.get("type")
        raise BatchingError(f"optimizer_params, type: {kind!r} is not supported, only adam_params")
    return OptimStep(**{name: float(value) for name, value in sent.adam_params or _AdamParams()})


def _save_weights(content: dict[str, Any]) -> SaveWeights:
    sent = read_part(content, _SaveWeights, path=["save_weights"])
    return SaveWeights(
        name=checkpoint_name(sent.path),
        ttl_seconds=sent.ttl_seconds,
        overwrite=sent.overwrite or False,
        user_metadata=sent.user_metadata or {},
    )


def _save_for_sampler(content: dict[str, Any]) -> SaveForSampler:
    sent = read_part(content, _SaveForSampler, path=["save_weights_for_sampler"])
    is_named = sent.path is not None
    if is_named == (sent.sampling_session_seq_id is not None):
        values = f"path is {sent.path!r}, sampling_session_seq_id {sent.sampling_session_seq_id}"
        raise BatchingError(f"{values}: expected one of them")
    if is_named and sent.kind == "inflight":
        raise BatchingError("kind is 'inflight', but a named checkpoint is a snapshot")
    return SaveForSampler(
        name="" if sent.path is None else checkpoint_name(sent.path),
        sampling_session_seq_id=sent.sampling_session_seq_id,
        kind=sent.kind or "snapshot",
        ttl_seconds=sent.ttl_seconds,
        user_metadata=sent.user_metadata or {},
    )


def _save_external(content: dict[str, Any]) -> SaveExternal:
    sent = read_part(content, _SaveExternal, path=["save_weights_external"])
    recipients = sent.age_encryption_recipients or []
    check_recipients(recipients)
    return SaveExternal(checkpoint_name(sent.path), sent.ttl_seconds, recipients)


def _load_weights(content: dict[str, Any]) -> LoadWeights:
    sent = read_part(content, _LoadWeights, path=["load_weights"])
    if sent.weights_access_token:
        raise BatchingError("weights_access_token is not supported: use the key of the weights")
    path = CheckpointPath.parse(sent.path)
    if path.kind != "weights":
        message = f"path is {sent.path!r}: training needs a checkpoint of save_weights"
        raise BatchingError(message)
    return LoadWeights(path, sent.optimizer or False)


_DECODERS: Final[dict[str, Callable[[dict[str, Any]], Content]]] = {
    "forward_backward_run": _forward_backward_run,
    "optim_step": _optim_step,
    "save_weights": _save_weights,
    "save_weights_for_sampler": _save_for_sampler,
    "save_weights_external": _save_external,
    "load_weights": _load_weights,
}
