"""Builders of training calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstream.batching.rows.operations import LOSS_INPUTS, Datum, Operation
from turnstream_server.operations.operation_records import encode_operation


def make_operation(
    *lengths: int,
    loss: str = "cross_entropy",
    num_targets: int | None = None,
    seed: int = 0,
    **settings: float,
) -> Operation:
    """Return an operation with a datum of each length; equal arguments have equal numbers."""
    rng = np.random.default_rng(seed)
    data = [_datum(length, loss=loss, num_targets=num_targets, rng=rng) for length in lengths]
    return Operation(request_id="unnamed", loss=loss, data=data, settings=settings)


def make_bodies(operations: Sequence[Operation], *, first: int = 1) -> dict[int, bytes]:
    """Return the contents of commands that begin with number `first`."""
    return {first + place: encode_operation(each) for place, each in enumerate(operations)}


def _datum(
    num_tokens: int, *, loss: str, num_targets: int | None, rng: np.random.Generator
) -> Datum:
    shape = (num_tokens,) if num_targets is None else (num_tokens, num_targets)
    inputs = {name: rng.integers(0, 2, num_tokens).astype(np.float32) for name in LOSS_INPUTS[loss]}
    return Datum(
        model_input=rng.integers(1, 128, num_tokens).astype(np.int32),
        target_tokens=rng.integers(1, 128, shape),
        weights=rng.normal(size=shape).astype(np.float32),
        **inputs,
    )
