"""Random log-probabilities for losses and corrections, which are compared with loops."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st


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
