"""Advantages: how good every trajectory was, compared with the others of its group.

There is one number per trajectory, with gigpo one per turn. All numbers are float64. The table in
docs/advantages.md defines the estimators. In grpo_leave_one_out, only a std above 0 divides. With
opo, w are the trained tokens, or a metric that the generator computes: the baseline has the least
variance where w is the squared norm of the gradient of log p.

The advantage in a group of one is 0, or its raw reward by setting. Equal rewards give exactly 0.
Any result can be whitened over the trained tokens of the batch in the same way (`normalize`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.config.values import (
    Estimator,
    NormalizeAdvantages,
    SingletonAdvantage,
)
from turnstream.errors import BatchingError, UnsupportedEstimatorError
from turnstream.types import Ragged

FloatArray = NDArray[np.float64]

EPSILON = 1e-6
"""Added to a standard deviation: rewards that differ by less than this are nearly equal."""

WHITENING_EPSILON = 1e-8
"""Added to a variance."""

NORMALIZED = ("reinforce_pp", "reinforce_pp_baseline")
"""Estimators that are whitened by their definition."""


class GroupOutcomes(NamedTuple):
    """Rewards and lengths of the n trajectories of one group, which are compared.

    Attributes:
        rewards: float64 (n,); with gdpo (n, C), one column per component; with remax, that of the
            greedy sample comes first.
        num_tokens: int64 (n,), trained tokens of each trajectory.
        baseline_weights: float64 (n,), w of opo; None for `num_tokens`.
    """

    rewards: FloatArray
    num_tokens: NDArray[np.int64]
    baseline_weights: FloatArray | None = None


def trajectory_advantages(
    groups: Sequence[GroupOutcomes],
    *,
    estimator: Estimator,
    singleton: SingletonAdvantage = "zero",
    component_weights: Sequence[float] = (),
    divide_by_std: bool = True,
    pass_k: int = 1,
    normalize: NormalizeAdvantages = "none",
) -> list[FloatArray]:
    """Return float64 (n,) per group: the advantages of the trajectories of one whole batch.

    With gigpo, this is the part of the whole trajectories. With pass_at_k, k is `pass_k`, at least
    2; in a group of fewer members, k is their number.
    """
    if estimator == "gdpo":
        return _gdpo(groups, weights=component_weights, singleton=singleton)
    if estimator == "gigpo":
        estimator = "grpo" if divide_by_std else "dr_grpo"
    if estimator == "gae":
        return [np.zeros(len(group.rewards)) for group in groups]
    if estimator == "reinforce_pp":
        compared = [group.rewards for group in groups]
    else:
        compared = [
            _compared(group, estimator=estimator, pass_k=pass_k)
            if len(group.rewards) > 1
            else _singleton(group.rewards, singleton)
            for group in groups
        ]
    if normalize == "none" and estimator not in NORMALIZED:
        return compared
    return whitened(compared, num_tokens=[group.num_tokens for group in groups])


def whitened(
    values: Sequence[FloatArray], *, num_tokens: Sequence[NDArray[np.int64]]
) -> list[FloatArray]:
    """Return (x - mean) / sqrt(var + 1e-8) over the trained tokens of a whole batch.

    `num_tokens` counts the tokens that have each value. Values without a token count in neither
    mean nor variance; if no value has a token, all stay as they are.

    >>> whitened([np.array([1.0]), np.array([0.0, 5.0])],
    ...          num_tokens=[np.array([3]), np.array([3, 0])])[0].round(6)
    array([1.])
    """
    flat = np.concatenate(values) if values else np.empty(0)
    counts = np.concatenate(num_tokens) if num_tokens else np.empty(0)
    if not counts.any():
        return list(values)
    shifted = flat - flat[0]
    mean = np.average(shifted, weights=counts)
    variance = np.average((shifted - mean) ** 2, weights=counts)
    white = (shifted - mean) / np.sqrt(variance + WHITENING_EPSILON)
    return np.split(white, np.cumsum([len(part) for part in values])[:-1])


def gigpo(
    rewards: FloatArray,
    *,
    turn_rewards: Sequence[FloatArray],
    anchors: Sequence[Sequence[Hashable]],
    gamma: float = 1.0,
    turn_weight: float = 1.0,
    divide_by_std: bool = True,
    singleton: SingletonAdvantage = "zero",
) -> list[FloatArray]:
    """Return float64 (turns,) per trajectory of a group: A_trajectory + turn_weight * A_turn.

    GiGPO (arXiv:2505.10978). The discounted return of a turn is compared with those of the turns of
    the group that began in the same state. A state seen once gives 0. All later turns of the
    trajectory follow a turn, in order. `rewards` (n,) are those of the whole trajectories;
    `turn_rewards` and `anchors` hold one value per turn of each.

    With rewards 1 and 0 at the end, two turns each, and both in state "s" first:

    >>> both = [["s", "t"], ["s", "u"]]
    >>> gigpo(np.array([1.0, 0.0]), turn_rewards=[np.array([0.0, 1.0]), np.zeros(2)],
    ...       anchors=both, divide_by_std=False)
    [array([1. , 0.5]), array([-1. , -0.5])]
    """
    for index, (own, states) in enumerate(zip(turn_rewards, anchors, strict=True)):
        if len(own) != len(states):
            raise BatchingError(
                f"trajectory {index} has {len(states)} anchors for {len(own)} turns"
            )
    if not turn_rewards:
        return []
    compare = _grpo if divide_by_std else _centred
    whole = compare(rewards) if len(rewards) > 1 else _singleton(rewards, singleton)
    returns = np.concatenate([_discounted(own, gamma) for own in turn_rewards])
    by_turn = np.zeros(len(returns))
    for positions in _places_by_state(anchors):
        if len(positions) > 1:
            by_turn[positions] = compare(returns[positions])
    cuts = np.cumsum([len(own) for own in turn_rewards])[:-1]
    return [
        of_trajectory + turn_weight * own
        for of_trajectory, own in zip(whole, np.split(by_turn, cuts), strict=True)
    ]


def broadcast_turns(
    advantages: Ragged[np.float32], *, ends: Ragged[np.int64], loss_mask: Ragged[np.uint8]
) -> Ragged[np.float32]:
    """Return every turn's advantage at the trained tokens of its response, 0.0 at all others.

    Each row has one turn at least. `ends` counts the response tokens of a row up to the end of each
    turn's response.
    """
    loss_mask = loss_mask.flat()
    counts_N = np.diff(ends.values, prepend=0)
    first = ends.offsets[:-1]
    counts_N[first] = ends.values[first]
    per_token = np.repeat(advantages.values, counts_N)
    return Ragged(np.where(loss_mask.values, per_token, np.float32(0)), loss_mask.offsets)


def _grpo(rewards: FloatArray, *, ddof: int = 1) -> FloatArray:
    deviation = _centred(rewards)
    variance = (deviation @ deviation) / (len(rewards) - ddof)
    return deviation / (np.sqrt(variance) + EPSILON)


def _centred(rewards: FloatArray) -> FloatArray:
    """R - mean. Shifted first, so that equal rewards give exactly 0."""
    shifted = rewards - rewards[0]
    return shifted - shifted.mean()


def _leave_one_out_mean(rewards: FloatArray) -> FloatArray:
    """R - mean of the others, which is n / (n - 1) * (R - mean)."""
    return _centred(rewards) * (len(rewards) / (len(rewards) - 1))


def _grpo_leave_one_out(rewards: FloatArray) -> FloatArray:
    deviation = _leave_one_out_mean(rewards)
    scale = np.ones(len(rewards))
    for index in range(len(rewards)):
        others = np.delete(rewards, index)
        if len(others) > 1 and others.min() < others.max():
            scale[index] = others.std(ddof=1) + EPSILON
    return deviation / scale


def _maxrl(rewards: FloatArray) -> FloatArray:
    if (rewards < 0).any():
        raise UnsupportedEstimatorError(
            f"maxrl divides by the mean reward, and a reward is {rewards.min()}"
        )
    return _centred(rewards) / (rewards.mean() + EPSILON)


def _opo(group: GroupOutcomes) -> FloatArray:
    weights = group.num_tokens if group.baseline_weights is None else group.baseline_weights
    if not weights.any():
        return _centred(group.rewards)
    shifted = group.rewards - group.rewards[0]
    return shifted - np.average(shifted, weights=weights)


def _pass_at_k(rewards: FloatArray, k: int) -> FloatArray:
    """Return n times eq. 33 of PKPO: their mean times grad log p is the gradient of max@k.

    A_i sums max(I) - max(I without i) over all subsets I of k members with i, times n / C(n, k).
    In ascending order of rewards only gaps below i count: the gap above the first m rewards is in
    C(m, k - 1) subsets. The factors follow from one another, so no binomial coefficient is
    computed, and equal rewards have equal advantages.
    """
    if k < 2:
        raise BatchingError(f"pass_at_k with pass_k={k}: it must be at least 2")
    n = len(rewards)
    order = np.argsort(rewards, kind="stable")
    factors = np.zeros(n - 1)  # index m - 1: the gap above the first m rewards
    factor = float(k)
    for m in range(n - 1, k - 2, -1):
        factors[m - 1] = factor
        factor *= (m - k + 1) / m
    advantages = np.zeros(n)
    advantages[order[1:]] = np.cumsum(np.diff(rewards[order]) * factors)
    return advantages


_ESTIMATES: dict[str, Callable[[GroupOutcomes], FloatArray]] = {
    "grpo": lambda group: _grpo(group.rewards),
    "grpo_population": lambda group: _grpo(group.rewards, ddof=0),
    "grpo_leave_one_out": lambda group: _grpo_leave_one_out(group.rewards),
    "dr_grpo": lambda group: _centred(group.rewards),
    "rloo": lambda group: _leave_one_out_mean(group.rewards),
    "maxrl": lambda group: _maxrl(group.rewards),
    "opo": _opo,
    "remax": lambda group: group.rewards - group.rewards[0],
    "reinforce_pp_baseline": lambda group: _centred(group.rewards),
}


def _compared(group: GroupOutcomes, *, estimator: str, pass_k: int) -> FloatArray:
    """Return the advantages in a group of two or more."""
    if estimator == "pass_at_k":
        return _pass_at_k(group.rewards, min(pass_k, len(group.rewards)))
    return _ESTIMATES[estimator](group)


def _gdpo(
    groups: Sequence[GroupOutcomes], *, weights: Sequence[float], singleton: SingletonAdvantage
) -> list[FloatArray]:
    summed: list[FloatArray] = []
    for group in groups:
        if not len(group.rewards):
            summed.append(np.zeros(0))
            continue
        parts = [
            _grpo(column) if len(column) > 1 else _singleton(column, singleton)
            for column in group.rewards.T
        ]
        summed.append(np.asarray(weights) @ np.array(parts))
    everything = np.concatenate(summed) if summed else np.empty(0)
    if len(everything) < 2:
        return summed
    mean, std = everything.mean(), everything.std(ddof=1)
    return [(part - mean) / (std + EPSILON) for part in summed]


def _singleton(rewards: FloatArray, singleton: SingletonAdvantage) -> FloatArray:
    return rewards.astype(np.float64) if singleton == "raw" else np.zeros(len(rewards))


def _places_by_state(anchors: Sequence[Sequence[Hashable]]) -> Iterable[list[int]]:
    """Return for every state the turns that began in it, counted through all trajectories."""
    places: dict[Hashable, list[int]] = {}
    for place, state in enumerate(itertools.chain.from_iterable(anchors)):
        places.setdefault(state, []).append(place)
    return places.values()


def _discounted(rewards: FloatArray, gamma: float) -> FloatArray:
    """Return-to-go of every turn."""
    returns = np.zeros(len(rewards))
    ahead = 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        ahead = float(rewards[turn]) + gamma * ahead
        returns[turn] = ahead
    return returns
