"""Settings of the engine: layout, type, AdamW, schedule. Without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from turnstream.errors import InvalidConfigError

Layout = Literal["padded", "packed"]
"""Shape of a forward pass: rows at one width, or one after another."""

Dtype = Literal["auto", "float32", "bfloat16"]
"""Type of the matrix products; "auto" is bfloat16 on a CUDA device, and float32 elsewhere."""

Parallel = Literal["ddp", "fsdp2"]
"""Weights of several ranks: the whole model on each, or a shard of each weight (`fully_shard`)."""

SCHEDULES: Final = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
)
"""Names of transformers whose learning rate depends on the number of the update alone."""

INFERENCE_SERVERS: Final = ("vllm", "sglang")
"""Kinds of inference servers that load published weights."""

_ENDLESS: Final = ("constant", "constant_with_warmup", "inverse_sqrt")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """Settings of one step of AdamW (arXiv:1711.05101). Each step may have others.

    Attributes:
        learning_rate: not negative.
        beta1, beta2: decay of the first and second moment; at least 0, below 1.
        eps: added to the root of the second moment; above 0.
        weight_decay: share of a weight that a step removes, times the learning rate. Vectors, which
            are biases and the scales of norms, have no decay.
        max_grad_norm: gradients of a larger global norm are scaled down to it; 0: never.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay", "max_grad_norm"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidConfigError(name, f"{getattr(self, name)} is not a number from 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidConfigError(name, f"{getattr(self, name)} is not in 0 <= {name} < 1")
        if not 0 < self.eps < float("inf"):
            raise InvalidConfigError("eps", f"{self.eps} is not above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """Schedule of the learning rate, by its name in transformers.

    Attributes:
        name: one of `SCHEDULES`.
        warmup_updates: updates of linear growth at the start.
        total_updates: updates of the whole schedule; 0 where its name needs no end.
        arguments: further arguments of transformers' `get_scheduler`, such as
            `{"min_lr_rate": 0.1}` of "cosine_with_min_lr".
    """

    name: str = "constant_with_warmup"
    warmup_updates: int = 0
    total_updates: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        require_one_of("schedule", self.name, SCHEDULES)
        if self.name == "constant" and self.warmup_updates:
            message = f"{self.warmup_updates} with schedule constant; use constant_with_warmup"
            raise InvalidConfigError("warmup_updates", message)
        if self.name.startswith("constant") and self.total_updates:
            message = f"{self.total_updates} is not read: {self.name} has no end"
            raise InvalidConfigError("schedule_updates", message)
        if self.name not in _ENDLESS and self.total_updates <= self.warmup_updates:
            message = f"{self.total_updates} is not above warmup_updates={self.warmup_updates}"
            raise InvalidConfigError("schedule_updates", f"{message}, which {self.name} needs")


def require_one_of(field: str, value: str, names: Sequence[str]) -> None:
    """Raise InvalidConfigError if the value of a field is not one of these names."""
    if value not in names:
        raise InvalidConfigError(field, f"{value!r} is not one of {', '.join(names)}")


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the object of a JSON text; InvalidConfigError for others and infinite numbers.

    >>> parse_arguments('{"num_cycles": 2}')
    {'num_cycles': 2}
    """
    try:
        arguments = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidConfigError("schedule_arguments", f"{text!r} is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise InvalidConfigError("schedule_arguments", f"{text!r} is no JSON object")
    for name, value in arguments.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidConfigError("schedule_arguments", f"{name} is {value}, not finite")
    return arguments


def parse_push(target: str) -> tuple[str, str]:
    """Return kind and address of an inference server; InvalidConfigError for another text.

    >>> parse_push("vllm=http://10.0.0.7:8000/")
    ('vllm', 'http://10.0.0.7:8000')
    """
    kind, _, url = target.partition("=")
    if kind not in INFERENCE_SERVERS:
        message = f"{target!r} is not vllm=URL or sglang=URL, such as vllm=http://10.0.0.7:8000"
        raise InvalidConfigError("--push", message)
    return kind, checked_url(url)


def checked_url(url: str) -> str:
    """Return an HTTP address without the slash at its end; InvalidConfigError for another text.

    >>> checked_url("http://10.0.0.7:8000/")
    'http://10.0.0.7:8000'
    """
    with suppress(ValueError):  # the port is no number
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url.rstrip("/")
    raise InvalidConfigError("--push", f"{url!r} is no address such as http://10.0.0.7:8000")
