"""The contents of operations other than training calls, and their JSON.

Training calls have tensors: see `operation_records.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from turnstream_server.operations.checkpoints import CheckpointPath

OperationKind = Literal[
    "create",
    "forward",
    "forward_backward",
    "forward_backward_run",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
]
"""Kinds of the operations of a model. `create` has the number 0."""

_LARGE_BYTES: Final = 1 << 20

TRAINING_KINDS: Final = ("forward", "forward_backward")


class CreateModel(NamedTuple):
    """Make the model of a record, with the weights of a checkpoint if there is one.

    With `optimizer`, the moments of the checkpoint are loaded too.
    """

    path: CheckpointPath | None
    optimizer: bool


class ForwardBackwardRun(NamedTuple):
    """Add the gradient of the next mini-batch of a run, whose id this is.

    `settings` are those of the loss that differ from its defaults.
    """

    run: str
    loss_fn: str
    settings: Mapping[str, float]


class OptimStep(NamedTuple):
    """A step of AdamW; the defaults are those of the SDK. A `grad_clip_norm` of 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class SaveWeights(NamedTuple):
    """Save weights and optimizer under a name, for `ttl_seconds` or for ever.

    Without `overwrite`, a name that is taken is an error.
    """

    name: str
    ttl_seconds: int | None
    overwrite: bool
    user_metadata: Mapping[str, str]


class SaveForSampler(NamedTuple):
    """Save weights for sampling: a named checkpoint, or those of one sampling session.

    Attributes:
        name: "" for a sampling session.
        sampling_session_seq_id: number of the session; None for a named checkpoint.
        kind: "snapshot" never changes. "inflight" is the same for all its sessions of the model,
            and newer saves replace its weights.
        ttl_seconds, user_metadata: as in `SaveWeights`.
    """

    name: str
    sampling_session_seq_id: int | None
    kind: Literal["snapshot", "inflight"]
    ttl_seconds: int | None
    user_metadata: Mapping[str, str]


class SaveExternal(NamedTuple):
    """Export weights for other programs, encrypted for the public keys of age, if there are any."""

    name: str
    ttl_seconds: int | None
    recipients: Sequence[str]


class LoadWeights(NamedTuple):
    """Load a checkpoint into the model; without `optimizer` its moments begin at zero."""

    path: CheckpointPath
    optimizer: bool


Content = (
    CreateModel
    | ForwardBackwardRun
    | OptimStep
    | SaveWeights
    | SaveForSampler
    | SaveExternal
    | LoadWeights
)

CONTENT_TYPES: Final[Mapping[str, type[Content]]] = {
    "create": CreateModel,
    "forward_backward_run": ForwardBackwardRun,
    "optim_step": OptimStep,
    "save_weights": SaveWeights,
    "save_weights_for_sampler": SaveForSampler,
    "save_weights_external": SaveExternal,
    "load_weights": LoadWeights,
}


def encode_content(content: Content) -> bytes:
    """Return a content as JSON; equal contents have equal bytes.

    >>> encode_content(LoadWeights(CheckpointPath("S:train:0", "weights", "a"), optimizer=True))
    b'{"optimizer":true,"path":"tinker://S:train:0/weights/a"}'
    """
    values = content._asdict()
    if values.get("path") is not None:
        values["path"] = str(values["path"])
    return json.dumps(values, separators=(",", ":"), sort_keys=True).encode()


def identity_of(content: Content) -> bytes:
    """Return the bytes that are equal in all attempts of a client to submit an operation.

    The SDK takes the next number of a sampling session for each attempt. The first one counts.
    """
    if isinstance(content, SaveForSampler) and content.sampling_session_seq_id is not None:
        content = content._replace(sampling_session_seq_id=0)
    return encode_content(content)


def decode_content(kind: str, data: bytes) -> Content:
    """Return the content of `encode_content`."""
    values: dict[str, Any] = json.loads(data)
    if values.get("path") is not None:
        values["path"] = CheckpointPath.parse(values["path"])
    return CONTENT_TYPES[kind](**values)  # pyright: ignore[reportArgumentType]


async def fingerprint_async(data: bytes) -> str:
    """Return the fingerprint of a content: in a thread if it takes more than a millisecond."""
    is_large = len(data) > _LARGE_BYTES
    return await asyncio.to_thread(fingerprint, data) if is_large else fingerprint(data)


def fingerprint(data: bytes | memoryview) -> str:
    """Return the fingerprint by which a repeated operation is recognised."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
