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

from testkit.operation_reference import datum_loss
from testkit.shares import budgeted_passes, join_shares, rank_share
from testkit.training import make_engine, make_mini_batch, make_model, pulled
from turnstream.batching.layouts.outputs import join_by_row_id
from turnstream.batching.packing.microbatch import Budget
from turnstream.batching.rows.operations import (
    LOSS_INPUTS,
    LOSS_SETTINGS,
    Datum,
    Operation,
    check_operation,
    operation_rows,
    sums_by_request,
)
from turnstream.errors import BatchingError
from turnstream.records.batches import decode_mini_batch, encode_mini_batch
from turnstream.types import MiniBatch, Rows
from turnstream_server.trainer.passes import OperationLoss
from turnstream_server.trainer.settings import AdamSettings

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


def test_gradients_of_two_calls_equal_those_of_one_with_both_data() -> None:
    whole = make_operation("cross_entropy")
    halves = [replace(whole, request_id=name, data=whole.data[cut]) for name, cut in _HALVES]
    loss = OperationLoss(name="cross_entropy")
    one, other = make_engine(), make_engine()

    one.forward_backward_operations(pulled(operation_rows([whole], first_row_id=0)), loss=loss)
    for half in halves:
        made = pulled(operation_rows([half], first_row_id=0))
        other.forward_backward_operations(made, loss=loss)

    for mine, theirs in zip(other.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


_HALVES = (("a", slice(0, 2)), ("b", slice(2, None)))


def test_calls_that_share_a_pass_have_losses_of_their_own() -> None:
    whole = make_operation("importance_sampling")
    halves = [replace(whole, request_id=name, data=whole.data[cut]) for name, cut in _HALVES]
    loss = OperationLoss(name="importance_sampling")
    shared = pulled(operation_rows(halves, first_row_id=3))

    report = make_engine().forward_backward_operations(shared, loss=loss)

    assert shared.rows.operations is not None
    sums_B = np.array([report.losses[row] for row in shared.rows.row_id.tolist()])
    sums = sums_by_request(shared.rows.operations, sums_B)
    expected = Reference(whole).losses
    assert sums["a"] == pytest.approx(sum(expected[:2]), rel=1e-5)
    assert sums["b"] == pytest.approx(sum(expected[2:]), rel=1e-5)


def test_forward_leaves_gradients_and_returns_the_same_report() -> None:
    mini_batch = pulled(operation_rows([make_operation("ppo")], first_row_id=0))
    engine, loss = make_engine(), OperationLoss(name="ppo")

    before = engine.forward_operations(mini_batch, loss=loss)
    has_gradient = any(each.grad is not None for each in engine.model.parameters())
    after = engine.forward_backward_operations(mini_batch, loss=loss)

    assert not has_gradient
    assert before.losses == pytest.approx(after.losses)
    for row, values in after.logprobs.items():
        np.testing.assert_allclose(before.logprobs[row], values, rtol=1e-6)


def test_step_after_operations_changes_weights_and_ends_the_sum() -> None:
    mini_batch = pulled(operation_rows([make_operation("cross_entropy")], first_row_id=0))
    engine, loss = make_engine(), OperationLoss(name="cross_entropy")
    engine.forward_backward_operations(mini_batch, loss=loss)
    norm = engine.optim_step(AdamSettings(learning_rate=0.0, max_grad_norm=0.0)).gradient_norm

    engine.forward_backward_operations(mini_batch, loss=loss)
    again = engine.optim_step(AdamSettings(learning_rate=0.1, max_grad_norm=0.0)).gradient_norm

    assert norm > 0
    assert again == pytest.approx(norm, rel=1e-6)
    assert engine.num_updates == 2


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
