"""Tinker-style forward_backward calls as rows, the passes they share, and the answer of each.

Operations share a pass only where their loss and its settings are equal, and each is answered with
its own sums. A bad operation is refused alone. `turnstream.worker.operation_losses` has the losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.merge.buffers import offsets_of
from turnstream.batching.merge.columns import OBSERVED
from turnstream.batching.rows.plain_rows import plain_rows
from turnstream.errors import BatchingError
from turnstream.types import OperationColumns, Ragged, Rows

_Scalar = TypeVar("_Scalar", bound=np.generic)

_SCORED: Final = ("logprobs", "advantages")
LOSS_INPUTS: Final[dict[str, tuple[str, ...]]] = {
    "cross_entropy": (),
    "importance_sampling": _SCORED,
    "ppo": _SCORED,
    "cispo": _SCORED,
    "dro": _SCORED,
    "gspo": (*_SCORED, "sequence_ratio_mask"),
}
"""The losses that rows can carry, and what each needs beside targets; all of them take weights."""

_CLIP: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSS_SETTINGS: Final[dict[str, dict[str, float]]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": _CLIP,
    "cispo": _CLIP,
    "dro": {"beta": 0.05},
    "gspo": _CLIP,
}
"""The settings of each loss with their defaults. The thresholds are ratios, as 0.8 for 1 - 0.2."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """One row of an operation: the logits at a position score the target there, without a shift.

    Attributes:
        model_input: int32 (N,).
        target_tokens: int64 (N,); or (N, K), K targets per position, for cross-entropy alone.
        weights: float32, of any sign, shaped as the targets; None is 1 everywhere.
        logprobs: float32 (N,), nats, when the targets were sampled.
        advantages: float32 (N,).
        sequence_ratio_mask: float32 (N,), 0 or 1: the positions of the mean ratio of gspo.
    """

    model_input: NDArray[np.int32]
    target_tokens: NDArray[np.int64]
    weights: NDArray[np.float32] | None = None
    logprobs: NDArray[np.float32] | None = None
    advantages: NDArray[np.float32] | None = None
    sequence_ratio_mask: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """One forward_backward call.

    Attributes:
        request_id: its name, not empty.
        loss: one of LOSS_INPUTS.
        data: one or more.
        settings: name to loss setting; those of LOSS_SETTINGS that are missing have defaults.
    """

    request_id: str
    loss: str
    data: Sequence[Datum]
    settings: Mapping[str, float] = field(default_factory=dict[str, float])


def check_operation(operation: Operation) -> None:
    """Refuse an operation whose rows could not be computed."""
    name = operation.request_id
    if operation.loss not in LOSS_INPUTS:
        raise BatchingError(
            f"operation {name!r}: loss {operation.loss!r} is not one of {', '.join(LOSS_INPUTS)}"
        )
    for setting, value in operation.settings.items():
        if problem := _setting_problem(operation, setting, value):
            raise BatchingError(f"operation {name!r}: {problem}")
    if not name or not operation.data:
        raise BatchingError(f"operation {name!r} of {len(operation.data)} data")
    num_targets = operation.data[0].target_tokens.shape[1:]
    for place, datum in enumerate(operation.data):
        problem = _problem(datum, loss=operation.loss)
        if not problem and datum.target_tokens.shape[1:] != num_targets:
            problem = f"target_tokens of shape {datum.target_tokens.shape}, unlike those of datum 0"
        if problem:
            raise BatchingError(f"operation {name!r}, datum {place}: {problem}")


def operations_by_pass(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Return lists of operations that may share a pass, in the order of their first members.

    >>> token = Datum(model_input=np.zeros(1, np.int32), target_tokens=np.zeros(1, np.int64))
    >>> calls = [Operation(request_id=name, loss=loss, data=[token])
    ...          for name, loss in (("a", "ppo"), ("b", "cross_entropy"), ("c", "ppo"))]
    >>> [[call.request_id for call in own] for own in operations_by_pass(calls)]
    [['a', 'c'], ['b']]
    """
    passes: dict[object, list[Operation]] = {}
    for operation in operations:
        num_targets = operation.data[0].target_tokens.shape[1:]
        kind = operation.loss, tuple(sorted(operation.settings.items())), num_targets
        passes.setdefault(kind, []).append(operation)
    return list(passes.values())


def operation_rows(operations: Sequence[Operation], *, first_row_id: int) -> Rows:
    """A row per datum, all of it response, in order."""
    data = [datum for operation in operations for datum in operation.data]
    input_ids = _joined([datum.model_input for datum in data])
    loss_mask = Ragged(np.ones(len(input_ids.values), np.uint8), input_ids.offsets)
    rows = plain_rows(
        input_ids,
        loss_mask,
        num_trained_B=input_ids.lengths.astype(np.int64),
        first_row_id=first_row_id,
    )
    one_run_B = np.arange(len(data) + 1, dtype=np.int32)
    return replace(
        rows,
        logprobs=_joined_if_given([datum.logprobs for datum in data]),
        run_versions=Ragged(np.full(len(data), OBSERVED, np.int64), one_run_B),
        run_counts=Ragged(input_ids.lengths, one_run_B),
        advantages=_joined_if_given([datum.advantages for datum in data]),
        operations=OperationColumns(
            request_id=[own.request_id for own in operations for _ in own.data],
            datum_index=np.array([i for own in operations for i in range(len(own.data))], np.int32),
            target_ids=_joined([datum.target_tokens for datum in data]),
            target_weights=_joined([_weights(datum) for datum in data]),
            ratio_mask=_joined_if_given([datum.sequence_ratio_mask for datum in data]),
        ),
    )


def sums_by_request(operations: OperationColumns, sums_B: NDArray[Any]) -> dict[str, float]:
    """Return the sum of each operation over its rows, however they were passed.

    `sums_B` (B,) is, for example, the loss summed over the positions of each row; sums are float64.
    """
    sums: dict[str, float] = {}
    for request_id, value in zip(operations.request_id, sums_B.tolist(), strict=True):
        if request_id:  # an inert row has none
            sums[request_id] = sums.get(request_id, 0.0) + value
    return sums


def _setting_problem(operation: Operation, name: str, value: float) -> str:
    known = LOSS_SETTINGS[operation.loss]
    if name not in known:
        names = ", ".join(known) or "none"
        return f"setting {name!r} is unknown; {operation.loss} has: {names}"
    if not np.isfinite(value) or value < 0:
        return f"setting {name} is {value}, not a number from 0"
    bounds = {**known, **operation.settings}
    if known is _CLIP and bounds["clip_low_threshold"] > bounds["clip_high_threshold"]:
        low, high = (bounds[each] for each in _CLIP)
        return f"clip_low_threshold {low} is above clip_high_threshold {high}"
    return ""


def _problem(datum: Datum, *, loss: str) -> str:
    num_tokens = len(datum.model_input)
    targets = datum.target_tokens.shape
    if not num_tokens:
        return "model_input is empty"
    if targets[0] != num_tokens or len(targets) > 2 or 0 in targets:
        return f"target_tokens of shape {targets} for {num_tokens} tokens of model_input"
    if LOSS_INPUTS[loss] and len(targets) > 1:
        return f"target_tokens of shape {targets}: {loss} takes one target per position"
    for name in (*LOSS_INPUTS[loss], "weights"):
        values: NDArray[np.float32] | None = getattr(datum, name)
        if values is None and name != "weights":
            return f"{name} is missing, which {loss} needs"
        if values is not None and values.shape != targets:
            return f"{name} of shape {values.shape} for target_tokens of shape {targets}"
        if values is not None and not np.isfinite(values).all():
            place = np.argwhere(~np.isfinite(values))[0].tolist()
            return f"{name} is {values[tuple(place)]} at {place}"
    mask = datum.sequence_ratio_mask
    if mask is not None and loss == "gspo" and not np.isin(mask, (0, 1)).all():
        place = int(np.flatnonzero(~np.isin(mask, (0, 1)))[0])
        return f"sequence_ratio_mask is {mask[place]} at [{place}], neither 0 nor 1"
    return ""


def _weights(datum: Datum) -> NDArray[np.float32]:
    return (
        np.ones(datum.target_tokens.shape, np.float32) if datum.weights is None else datum.weights
    )


def _joined(arrays: Sequence[NDArray[_Scalar]]) -> Ragged[_Scalar]:
    return Ragged(np.concatenate(arrays), offsets_of([len(array) for array in arrays]))


def _joined_if_given(arrays: Sequence[NDArray[np.float32] | None]) -> Ragged[np.float32] | None:
    """None where no datum has any: the loss of a pass asks for them in all data or in none."""
    given = [array for array in arrays if array is not None]
    return _joined(given) if len(given) == len(arrays) else None
