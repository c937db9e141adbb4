"""Losses and gradients of Tinker-style operations agree with a reference in float64.

The reference scores one datum at a time, without padding.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from testkit.shares import budgeted_passes, join_shares, rank_share
from testkit.training.operation_reference import datum_loss
from testkit.training.training import make_engine, make_mini_batch, make_model, pulled
from turnstream.batching.layouts.outputs import join_by_row_id
from turnstream.batching.packing.microbatch import Budget
from turnstream.batching.rows.operations import (
    LOSS_INPUTS,
    LOSS_SETTINGS,
    Datum,
    Operation,
    check_operation,
    operation_rows,
)
from turnstream.errors import BatchingError
from turnstream.records.batches import decode_mini_batch, encode_mini_batch
from turnstream.types import MiniBatch, Rows
from turnstream_server.trainer.passes import OperationLoss

LENGTHS = (5, 1, 9, 3, 7)
OTHER_SETTINGS = {
    "ppo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01},
    "cispo": {"clip_high_threshold": 1.05},
    "dro": {"beta": 0.7},
    "gspo": {"clip_low_threshold": 0.99, "clip_high_threshold": 1.0},
}
CASES = [(loss, {}) for loss in LOSS_INPUTS] + list(OTHER_SETTINGS.items())


def make_datum(num_tokens: int, *, rng: np.random.Generator, num_targets: int | None) -> Datum:
    shape = (num_tokens,) if num_targets is None else (num_tokens, num_targets)
    return Datum(
        model_input=rng.integers(1, 128, num_tokens).astype(np.int32),
        target_tokens=rng.integers(1, 128, shape),
        weights=rng.normal(size=shape).astype(np.float32),
        logprobs=rng.normal(-4.85, 0.3, num_tokens).astype(np.float32),
        advantages=rng.normal(size=num_tokens).astype(np.float32),
        sequence_ratio_mask=rng.integers(0, 2, num_tokens).astype(np.float32),
    )


def make_operation(
    loss: str, settings: Mapping[str, float] | None = None, *, num_targets: int | None = None
) -> Operation:
    rng = np.random.default_rng(7)
    data = [make_datum(length, rng=rng, num_targets=num_targets) for length in LENGTHS]
    operation = Operation(request_id="a", loss=loss, data=data, settings=settings or {})
    check_operation(operation)
    return operation


def share_of(rows: Rows, *, dp_rank: int, dp_world_size: int, limit: int) -> MiniBatch:
    """Return the mini-batch of a rank, as it arrives."""
    budget = Budget(limit=limit)
    ranks = {"dp_rank": dp_rank, "dp_world_size": dp_world_size, "budget": budget}
    share = rank_share(rows, step=1, mini_batch=0, pad_token_id=0, **ranks)
    passes = budgeted_passes(rows, **ranks)
    made = pulled(share, micro_batches=passes)
    return decode_mini_batch(encode_mini_batch(MiniBatch(rows=made.rows, info=made.info)).data)


class Reference:
    """Log-probabilities, losses and gradients of one operation, in float64."""

    def __init__(self, operation: Operation) -> None:
        model = copy.deepcopy(make_model()).double()
        settings = {**LOSS_SETTINGS[operation.loss], **operation.settings}
        self.logprobs: list[NDArray[np.float64]] = []
        self.losses: list[float] = []
        for datum in operation.data:
            ids = torch.from_numpy(datum.model_input.astype(np.int64))[None]
            logprobs_NV = model(input_ids=ids).logits[0].log_softmax(-1)
            targets_NK = torch.from_numpy(datum.target_tokens.reshape(len(datum.model_input), -1))
            current = logprobs_NV.gather(-1, targets_NK).reshape(datum.target_tokens.shape)
            inputs = {each.name: getattr(datum, each.name) for each in fields(datum)}
            loss = datum_loss(current, inputs, loss=operation.loss, settings=settings)
            loss.backward()
            self.logprobs.append(current.detach().numpy())
            self.losses.append(loss.item())
        self.gradients = {name: each.grad for name, each in model.named_parameters()}


def assert_agrees(
    operation: Operation, *, layout: str, limit: int = 12, dp_world_size: int = 1
) -> None:
    """Compare the results of all ranks with the reference: 1e-5 of the largest value."""
    expected = Reference(operation)
    rows = operation_rows([operation], first_row_id=0)
    loss = OperationLoss(name=operation.loss, settings=operation.settings)
    engine = make_engine(layout=layout)
    shares = [
        share_of(rows, dp_rank=rank, dp_world_size=dp_world_size, limit=limit)
        for rank in range(dp_world_size)
    ]

    reports = [engine.forward_backward_operations(share, loss=loss) for share in shares]

    whole = join_shares([share.rows for share in shares])
    logprobs = join_by_row_id([report.logprobs for report in reports], whole)
    for actual, wanted in zip(logprobs, expected.logprobs, strict=True):
        assert actual.shape == wanted.shape
        np.testing.assert_allclose(actual, wanted, rtol=1e-5)
    losses = {row: value for report in reports for row, value in report.losses.items()}
    scale = max(map(abs, expected.losses))
    for row, wanted in enumerate(expected.losses):
        assert losses[row] == pytest.approx(wanted, rel=1e-5, abs=1e-5 * scale)
    for name, parameter in engine.model.named_parameters():
        wanted = expected.gradients[name]
        assert (parameter.grad is None) == (wanted is None)
        if wanted is not None and parameter.grad is not None:
            difference = (parameter.grad - wanted).abs().max()
            assert difference <= 1e-5 * wanted.abs().max(), name


@pytest.mark.parametrize(("loss", "settings"), CASES)
def test_operation_equals_the_reference(loss: str, settings: dict[str, float]) -> None:
    assert_agrees(make_operation(loss, settings), layout="padded")


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("limit", [1, 8, 10_000])
@pytest.mark.parametrize("dp_world_size", [1, 3])
def test_operation_does_not_depend_on_layout_cut_and_ranks(
    layout: str, limit: int, dp_world_size: int
) -> None:
    # Five rows on three ranks: one rank has an inert row.
    operation = make_operation("dro")

    assert_agrees(operation, layout=layout, limit=limit, dp_world_size=dp_world_size)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("num_targets", [1, 3])
def test_several_targets_of_a_position_equal_the_reference(layout: str, num_targets: int) -> None:
    operation = make_operation("cross_entropy", num_targets=num_targets)

    assert_agrees(operation, layout=layout, dp_world_size=3)


def test_rows_and_losses_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(BatchingError, match="not those of operations"):
        make_engine().forward_backward_operations(
            make_mini_batch(), loss=OperationLoss(name="cross_entropy")
        )

    rows = operation_rows([make_operation("ppo")], first_row_id=0)
    assert rows.operations is not None
    without = replace(rows, operations=replace(rows.operations, ratio_mask=None))

    with pytest.raises(BatchingError, match="no ratio_mask, which the loss reads"):
        make_engine().forward_backward_operations(pulled(without), loss=OperationLoss(name="gspo"))
    with pytest.raises(BatchingError, match="loss 'reinforce' is not one of cross_entropy"):
        make_engine().forward_backward_operations(
            pulled(rows), loss=OperationLoss(name="reinforce")
        )
