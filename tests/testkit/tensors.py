"""Tensors of a mini-batch from a few lists, and random log-probabilities for losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from turnstream.types import Denominators
from turnstream.worker.tensors import LeftPaddedTensors


def tensors_of(
    masks: Sequence[str],
    *,
    trajectories: Sequence[Any] | None = None,
    groups: Sequence[Any] | None = None,
    weights: Sequence[float] | None = None,
    length_constant: int = 0,
) -> LeftPaddedTensors:
    """Rows from masks such as "101", right-aligned; an empty mask is an inert row.

    Every row is a trajectory of its own and all are one group unless given. The denominators are
    counted row by row, as in a plan.
    """
    width = max(map(len, masks))
    mask_BR = torch.tensor([[c == "1" for c in mask.rjust(width, "0")] for mask in masks])
    tokens = mask_BR.sum(dim=1).tolist()
    keys = list(trajectories or range(len(masks)))
    group_keys = list(groups or ["g"] * len(masks))
    weight = list(weights or [1.0] * len(masks))
    counted = [row for row in range(len(masks)) if tokens[row]]
    zeros_BR = torch.zeros(len(masks), width)
    return LeftPaddedTensors(
        input_ids_BT=torch.ones(len(masks), width + 1, dtype=torch.int64),
        attention_mask_BT=torch.ones(len(masks), width + 1, dtype=torch.bool),
        response_mask_BR=torch.tensor([[c != " " for c in mask.rjust(width)] for mask in masks]),
        loss_mask_BR=mask_BR,
        logprobs_BR=None,
        rewards_BR=zeros_BR,
        advantages_BR=zeros_BR,
        row_id_B=torch.arange(len(masks)),
        is_padding_B=torch.tensor([not mask for mask in masks]),
        weight_B=torch.tensor([w if m else 0.0 for w, m in zip(weight, masks, strict=True)]),
        trajectory_num_tokens_B=torch.tensor(_totals(keys, tokens)),
        group_num_tokens_B=torch.tensor(_totals(group_keys, tokens)),
        denominators=Denominators(
            num_tokens=sum(tokens),
            num_sequences=len(counted),
            num_trajectories=len({keys[row] for row in counted}),
            num_groups=len({group_keys[row] for row in counted}),
            weight_sum=float(sum(weight[row] for row in counted)),
            length_constant=length_constant,
        ),
        micro_batch_rows=(tuple(range(len(masks))),),
        row_lengths=tuple(len(mask) + 1 for mask in masks),
        response_lengths=tuple(map(len, masks)),
    )


def _totals(keys: list[Any], tokens: list[int]) -> list[int]:
    totals = dict.fromkeys(keys, 0)
    for key, num_tokens in zip(keys, tokens, strict=True):
        totals[key] += num_tokens
    return [totals[key] for key in keys]


class Case(NamedTuple):
    """Random log-probabilities, float64; values at masked positions have no effect."""

    current: np.ndarray
    old: np.ndarray
    behaviour: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray

    def tensors(self, *, skips: str = "") -> dict[str, Any]:
        """Return the values as tensors, by argument name."""
        values = self._asdict()
        return {f"{n}_BR": torch.from_numpy(v) for n, v in values.items() if n != skips}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Near and far log-probabilities, with nonsense at masked positions."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    near_and_far = rng.choice([0.1, 60.0], shape)  # an outlier among tokens that are kept
    spread = draw(st.sampled_from([1e-4, 0.2, 3.0, 60.0]) | st.just(near_and_far))
    behaviour = -rng.exponential(2.0, shape)
    mask = rng.random(shape) < draw(st.sampled_from([0.0, 0.6, 1.0]))
    case = Case(
        current=behaviour + rng.normal(0, spread, shape),
        old=behaviour + rng.normal(0, spread, shape),
        behaviour=behaviour,
        advantages=rng.choice([-2.0, -0.3, 0.0, 0.7, 1.5], shape),
        mask=mask,
    )
    for values in case[:4]:
        values[~mask] = rng.choice([np.nan, np.inf, 0.0])
    return case


def clipped_exp(exponent: float) -> float:
    """Return the exponential of an exponent between -20 and 20."""
    return math.exp(max(-20.0, min(20.0, exponent)))
