"""Functions of whole rows have the same results for padded and for flat rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import testkit
from turnstream.batching.rows.plain_rows import plain_rows
from turnstream.errors import BatchingError
from turnstream.types import MiniBatch, Ragged
from turnstream.worker.corrections import importance_ratio, mis, opsm, row_veto, seq_mask_tis, tis
from turnstream.worker.layouts import jagged_to_torch, packed_to_torch, right_padded_to_torch
from turnstream.worker.losses import aggregate, gspo
from turnstream.worker.policy_losses import gmpo
from turnstream.worker.tensors import to_torch


def _ratio(level: Any) -> Callable[..., Tensor]:
    return lambda first, **rest: importance_ratio(first, level=level, **rest)


def _level(correction: Callable[..., Tensor], level: Any, **bounds: float) -> Callable[..., Tensor]:
    return lambda first, **rest: correction(first, level=level, **bounds, **rest)


AGAINST_BEHAVIOUR = {
    "ratio by row": _ratio("sequence"),
    "ratio by mean": _ratio("geometric"),
    "tis by row": _level(tis, "sequence"),
    "tis by mean": _level(tis, "geometric", cap=1.1),
    "mis by row": _level(mis, "sequence", veto_below=0.05),
    "mis by mean": _level(mis, "geometric", low=0.8, high=1.3, veto_below=0.05),
    "veto": lambda first, **rest: row_veto(first, low=0.3, **rest),
    "seq_mask_tis": lambda first, **rest: seq_mask_tis(first, low=0.8, high=1.2, **rest),
}
AGAINST_OLD = {
    "gspo": gspo,
    "gmpo": gmpo,
    "opsm": lambda first, **rest: opsm(first, delta=0.05, **rest),
}


# "C" is a trained response token, "c" an observed one; "ab|" has no response; "a|b" may be inert.
_texts = st.just("|") | st.tuples(
    st.text("ab", min_size=1, max_size=2), st.text("cCD", max_size=3)
).map("|".join)


@given(texts=st.lists(_texts, max_size=7), num_inert=st.integers(0, 3), seed=st.integers(0, 99))
@example(texts=["ab|", "ab|", "ab|C"], num_inert=0, seed=0)
@example(texts=["ab|", "ab|C", "ab|", "ab|D"], num_inert=1, seed=1)
@example(texts=["|", "|", "a|CD"], num_inert=0, seed=2)
@example(texts=["ab|", "ab|"], num_inert=0, seed=3)
@example(texts=[], num_inert=3, seed=4)
@example(texts=[], num_inert=0, seed=5)
@pytest.mark.parametrize("name", [*AGAINST_BEHAVIOUR, *AGAINST_OLD])
def test_flat_shares_of_any_rows_match_the_padded_layout(
    name: str, texts: list[str], num_inert: int, seed: int
) -> None:
    # The sums of flat rows had as many places as tokens: a share with more rows than response
    # tokens raised IndexError in every function with a ratio per row.
    mini_batch = _mini_batch(texts, num_inert=num_inert)
    function = {**AGAINST_BEHAVIOUR, **AGAINST_OLD}[name]
    num_columns = 1 if name in AGAINST_BEHAVIOUR else 2
    padded: Any = to_torch(mini_batch)
    values = torch.randn(
        (num_columns + 1, *padded.loss_mask_BR.shape),
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )
    expected, expected_gradient = _weighted_sum(function, padded, values, padded.trained_tokens)

    flat = (jagged_to_torch(mini_batch), *packed_to_torch(mini_batch))
    for part in (*flat, right_padded_to_torch(mini_batch)):
        result, gradient = _weighted_sum(function, part, values, padded.trained_tokens)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(gradient, expected_gradient)


def _mini_batch(texts: list[str], *, num_inert: int) -> MiniBatch:
    """These rows, with inert ones at the end, in one forward pass."""
    inert = [False] * len(texts) + [True] * num_inert
    rows = testkit.rows(*texts, *["a|b"] * num_inert, is_padding=inert)
    return MiniBatch(rows=rows, info=testkit.mini_batch_info(rows))


def _weighted_sum(
    function: Callable[..., Tensor], part: Any, values: Tensor, trained_BR: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what the function gives each trained token, and the gradient of its first argument."""
    placed = torch.full((len(values), *part.trained_tokens.shape), float("nan")).double()
    placed[:, part.trained_tokens] = values[:, trained_BR]
    first = placed[0].clone().requires_grad_()
    names = ("behaviour_BR",) if len(values) == 2 else ("old_BR", "advantages_BR")
    columns = dict(zip(names, placed[1:], strict=True))
    result = function(first, **columns, mask_BR=part.trained_tokens, row_of=part.row_of)
    trained = result[part.trained_tokens]
    if trained.requires_grad:
        trained.square().sum().backward()
    gradient = torch.zeros_like(first) if first.grad is None else first.grad
    return trained.detach(), gradient[part.trained_tokens]


@pytest.mark.parametrize("function", AGAINST_BEHAVIOUR.values(), ids=AGAINST_BEHAVIOUR)
def test_flat_rows_without_row_of_are_refused(function: Callable[..., Tensor]) -> None:
    flat = torch.zeros(13)

    with pytest.raises(BatchingError, match=r"shape \(13,\) .* row_of=part\.row_of does"):
        function(flat, behaviour_BR=flat, mask_BR=flat == 0)


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "tolerance"),
    [
        (torch.float64, 100_000, 1e-9),
        (torch.float32, 100_000, 1e-6),
        (torch.bfloat16, 20_000, 1e-5),
        (torch.float16, 100_000, 1e-5),
    ],
    ids=str,
)
def test_long_row_has_its_exact_mean_in_every_layout(
    dtype: torch.dtype, num_tokens: int, tolerance: float
) -> None:
    # Where rows are packed their losses were added one by one in their own dtype: in bfloat16 the
    # sum stopped growing after some hundred tokens.
    ids = Ragged(np.ones(num_tokens + 1, np.int32), np.array([0, num_tokens + 1], np.int32))
    mask = Ragged(np.ones(num_tokens, np.uint8), np.array([0, num_tokens], np.int32))
    rows = plain_rows(ids, mask, num_trained_B=np.array([num_tokens]), first_row_id=0)
    mini_batch = MiniBatch(rows=rows, info=testkit.mini_batch_info(rows))
    losses = torch.rand(num_tokens, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = losses.double().mean().item()

    for to_tensors in (to_torch, right_padded_to_torch, packed_to_torch, jagged_to_torch):
        made: Any = to_tensors(mini_batch)
        part = made[0] if isinstance(made, list) else made
        placed = torch.zeros(part.trained_tokens.shape, dtype=dtype)
        placed[part.trained_tokens] = losses
        loss = aggregate(placed, part, mode="token_mean", denominators=part.denominators)
        assert loss.item() == pytest.approx(expected, rel=tolerance), to_tensors.__name__
