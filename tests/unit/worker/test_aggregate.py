"""The average of a loss: golden vectors, and a loop over rows and tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import testkit
from testkit.shares import count_denominators, row_scales
from testkit.tensors import tensors_of
from turnstream.batching.config.values import Aggregation
from turnstream.errors import BatchingError, InvalidConfigError
from turnstream.types import MiniBatch
from turnstream.worker.losses import aggregate
from turnstream.worker.tensors import to_torch

MODES = get_args(Aggregation)

# The vector of the definitions: rows A, B and C.
MASKS = ["1111", "1", "11"]
LOSSES = [[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 10.0], [0.0, 0.0, 2.0, 2.0]]


def losses(*rows: int) -> Tensor:
    return torch.tensor([LOSSES[row] for row in rows], dtype=torch.float64)


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("token_mean", {}, 3.428571),
        ("seq_mean_token_sum", {}, 8.0),
        ("seq_mean_token_mean", {}, 4.833333),
        ("constant", {"length_constant": 8}, 1.0),
        # Rows A and C are one trajectory, or one group: (10 + 4) / 6, and B: 10 / 1.
        ("rollout_mean", {"trajectories": ["t", "u", "t"]}, (14 / 6 + 10) / 2),
        ("prompt_mean", {"groups": ["g", "h", "g"]}, (14 / 6 + 10) / 2),
    ],
)
def test_aggregate_matches_the_golden_vector(mode: Any, options: Any, expected: float) -> None:
    part = tensors_of(MASKS, **options)

    mean = aggregate(losses(0, 1, 2), part, mode=mode, denominators=part.denominators)

    assert mean.item() == pytest.approx(expected, abs=1e-6)


def test_averaged_over_undoes_the_average_of_two_ranks() -> None:
    denominators = tensors_of(MASKS).denominators
    options: Any = {"mode": "token_mean", "denominators": denominators, "averaged_over": 2}

    on_rank_0 = aggregate(losses(0), tensors_of(MASKS[:1]), **options)
    on_rank_1 = aggregate(losses(1, 2), tensors_of(["0001", "11"]), **options)

    assert ((on_rank_0 + on_rank_1) / 2).item() == pytest.approx(3.428571, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_micro_batch_of_inert_rows_has_a_differentiable_loss_of_0(mode: Any) -> None:
    denominators = tensors_of(MASKS, length_constant=8).denominators
    part = tensors_of(["0", "0"])
    part = replace(part, is_padding_B=~part.is_padding_B, weight_B=torch.zeros(2))
    loss_BR = torch.full((2, 1), 5.0, requires_grad=True)

    total = aggregate(loss_BR, part, mode=mode, denominators=denominators)
    total.backward()

    assert total.item() == 0.0
    assert loss_BR.grad is not None
    assert loss_BR.grad.tolist() == [[0.0], [0.0]]


def test_aggregate_refuses_losses_of_another_shape() -> None:
    part = tensors_of(["11", "11"])

    with pytest.raises(BatchingError, match=r"\(2, 1\).*\(2, 2\)"):
        aggregate(torch.ones(2, 1), part, mode="token_mean", denominators=part.denominators)


@pytest.mark.parametrize(
    ("mode", "missing", "message"),
    [
        ("constant", "length_constant", r"one of token_mean, .* BatchStream\.config\.aggregation"),
        ("rollout_mean", "num_trajectories", "mini-batch of 7 trained tokens"),
        ("prompt_mean", "num_groups", "mini-batch of 7 trained tokens"),
    ],
)
def test_aggregate_refuses_a_mode_without_a_denominator(
    mode: Any, missing: str, message: str
) -> None:
    # In a run with another aggregation, the length constant is 0. The loss of mode "constant" was
    # then divided by 1, in silence: 24.0 here, and 1.0 in a run with a length constant of 8.
    part = tensors_of(MASKS, length_constant=8)
    denominators = part.denominators._replace(**{missing: 0})

    with pytest.raises(InvalidConfigError, match=message) as caught:
        aggregate(losses(0, 1, 2), part, mode=mode, denominators=denominators)

    assert caught.value.field == missing
    assert f"aggregation={mode!r}" in caught.value.message


@pytest.mark.parametrize("mode", MODES)
def test_mini_batch_without_trained_tokens_has_a_loss_of_0(mode: Any) -> None:
    part = tensors_of(["00", "0"], length_constant=8)

    assert aggregate(torch.ones(2, 2), part, mode=mode, denominators=part.denominators).item() == 0


@pytest.mark.parametrize("mode", MODES)
def test_aggregate_applies_the_row_scales_of_the_plan(mode: Any) -> None:
    rows = testkit.rows("abCD", "xYzZ", "a|bb", "a|b", group_ids=["g", "g", "h", ""])
    rows = replace(rows, weight=np.array([1.0, 0.5, 2.0, 0.0], np.float32))
    denominators = count_denominators([rows], length_constant=9)
    part = to_torch(MiniBatch(rows=rows, info=testkit.mini_batch_info(rows)))
    loss_BR = torch.zeros(part.loss_mask_BR.shape, dtype=torch.float64, requires_grad=True)

    aggregate(loss_BR, part, mode=mode, denominators=denominators).backward()

    scales_B = row_scales(rows, denominators=denominators, aggregation=mode)
    assert loss_BR.grad is not None
    np.testing.assert_allclose(
        loss_BR.grad.numpy(), scales_B[:, None] * part.loss_mask_BR.numpy(), rtol=1e-6
    )


def loop_mean(
    loss_BR: np.ndarray, masks: list[str], keys: list[Any], groups: list[Any], mode: str
) -> float:
    """Straight from the table of definitions; `constant` with a length of 7."""
    width = loss_BR.shape[1]
    rows = []
    for row, mask in enumerate(masks):
        live = [loss_BR[row, width - len(mask) + t] for t, c in enumerate(mask) if c == "1"]
        if live:
            rows.append((keys[row], groups[row], live))
    if not rows:
        return 0.0
    if mode == "token_mean":
        return sum(sum(live) for *_, live in rows) / sum(len(live) for *_, live in rows)
    if mode == "seq_mean_token_sum":
        return sum(sum(live) for *_, live in rows) / len(rows)
    if mode == "seq_mean_token_mean":
        return sum(sum(live) / len(live) for *_, live in rows) / len(rows)
    if mode == "constant":
        return sum(sum(live) for *_, live in rows) / (len(rows) * 7)
    position = 0 if mode == "rollout_mean" else 1
    of_key: dict[Any, list[float]] = {}
    for row in rows:
        of_key.setdefault(row[position], []).extend(row[2])
    return sum(sum(live) / len(live) for live in of_key.values()) / len(of_key)


@given(seed=st.integers(0, 2**32 - 1), mode=st.sampled_from(MODES))
def test_aggregate_equals_the_loop_whatever_masked_tokens_hold(seed: int, mode: Any) -> None:
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 10))
    masks = ["".join(rng.choice(["0", "1"], rng.integers(1, 7))) for _ in range(num_rows)]
    keys = rng.integers(0, 4, num_rows).tolist()
    groups = [key // 2 for key in keys]
    part = tensors_of(masks, trajectories=keys, groups=groups, length_constant=7)
    loss_BR = rng.normal(0, 10, part.loss_mask_BR.shape)
    loss_BR[~part.loss_mask_BR.numpy()] = np.nan

    mean = aggregate(torch.from_numpy(loss_BR), part, mode=mode, denominators=part.denominators)

    expected = loop_mean(loss_BR, masks, keys, groups, mode)
    np.testing.assert_allclose(mean.item(), expected, rtol=1e-12, atol=1e-12)


def test_weight_of_a_masked_token_is_not_read() -> None:
    part = replace(tensors_of(["101"]), token_weights_BR=torch.tensor([[0.5, float("nan"), 2.0]]))
    loss_BR = torch.ones(1, 3, requires_grad=True)

    total = aggregate(loss_BR, part, mode="token_mean", denominators=part.denominators)
    total.backward()

    assert total.item() == 1.25
    assert loss_BR.grad is not None
    assert loss_BR.grad.tolist() == [[0.25, 0, 1]]
