"""Filters of finished trajectories, by reward, status and length, and the weights of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.values import GREEDY_SAMPLE, RowWeights
from turnstream.batching.merge.merging import plan_sequences
from turnstream.types import SealedTrajectory, Status

ZERO_VARIANCE_TOLERANCE = 1e-6
"""Rewards closer than this are equal: shaped rewards of the same outcome differ by rounding."""


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal (DAPO, Yu et al. 2025, eq. 11); False for one reward.

    >>> has_zero_variance([1.0, 1.0]), has_zero_variance([1.0, 0.0]), has_zero_variance([1.0])
    (True, False, False)
    """
    return len(rewards) > 1 and max(rewards) - min(rewards) <= ZERO_VARIANCE_TOLERANCE


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return the penalty of a long response, to be added to the reward (DAPO, eq. 13).

    0 up to `max_tokens - buffer_tokens`, then falling linearly to -1 at `max_tokens`.

    >>> overlong_penalty(18_432, max_tokens=20_480, buffer_tokens=4_096)
    -0.5
    """
    excess = num_tokens - (max_tokens - buffer_tokens)
    return max(min(-excess / buffer_tokens, 0.0), -1.0)


def row_weights(kind: RowWeights, num_trained: Sequence[int]) -> tuple[float, ...]:
    """Return the float32 weights of the rows of a trajectory, from their trained tokens.

    The only row of a trajectory weighs 1. With two rows of 3 and 1 trained tokens::

        per_row          1     1      every row alike
        per_trajectory   1/2   1/2    every trajectory alike, its rows alike
        rollout_mean     3/4   1/4    every trajectory alike, its tokens alike
    """
    if kind == "per_row" or len(num_trained) == 1:
        return (1.0,) * len(num_trained)
    shares = [bool(count) if kind == "per_trajectory" else count for count in num_trained]
    total = max(sum(shares), 1)
    return tuple([float(np.float32(share / total)) for share in shares])


def num_response_tokens(trajectory: SealedTrajectory) -> int:
    """Tokens that the policy sampled, in all turns that are not left out."""
    return sum([turn.num_response_tokens for turn in trajectory.turns if not turn.is_left_out])


def status_problem(trajectory: SealedTrajectory, config: BatchingConfig) -> str:
    """Return why the status of a trajectory excludes it from its group; empty if it does not."""
    if trajectory.status is Status.ERROR and config.error_trajectories == "drop":
        return "ended with status 'error', and error_trajectories='drop'"
    return ""


def is_masked(trajectory: SealedTrajectory, config: BatchingConfig) -> bool:
    """Return whether no token of it is trained: greedy, cut off, too long, or failed."""
    return is_greedy(trajectory, config) or _is_cut_off(trajectory, config)


def is_greedy(trajectory: SealedTrajectory, config: BatchingConfig) -> bool:
    """Return whether it is the greedy sample, with which the estimator compares the others."""
    return config.has_greedy_sample and trajectory.key.sample == GREEDY_SAMPLE


def _is_cut_off(trajectory: SealedTrajectory, config: BatchingConfig) -> bool:
    if trajectory.status is Status.ERROR and config.error_trajectories == "mask":
        return True
    if not config.mask_truncated:
        return False
    limit = config.overlong_length
    is_overlong = limit > 0 and num_response_tokens(trajectory) > limit
    return is_overlong or trajectory.status in (Status.TRUNCATED, Status.ABORTED)


def is_compared(trajectory: SealedTrajectory, config: BatchingConfig) -> bool:
    """Return whether its reward is part of its group's baseline."""
    return config.masked_reward == "keep" or not _is_cut_off(trajectory, config)


def chain_problem(trajectory: SealedTrajectory, config: BatchingConfig) -> str:
    """Return why the turns are no single row, which "gae" needs; empty if they are."""
    if config.estimator != "gae":
        return ""
    num_rows = len(plan_sequences(trajectory.turns, merge=config.merge))
    if num_rows == 1:
        return ""
    return f"has {num_rows} rows, and estimator='gae' needs all its turns in one"


def length_problem(trajectory: SealedTrajectory, config: BatchingConfig) -> str:
    """Why a row of this trajectory exceeds what the run lets a pass cost; empty if none does."""
    if config.over_long == "alone":
        return ""
    budget = config.budget
    for row in plan_sequences(trajectory.turns, merge=config.merge):
        cost = budget.cost([row.num_tokens])
        if cost > budget.limit:
            return (
                f"has a row of {row.num_tokens} tokens, which costs {cost:g} of the "
                f"{budget.limit:g} that a micro-batch may"
            )
    return ""
