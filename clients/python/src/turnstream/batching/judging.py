"""What is said of trajectories and groups before any of their tokens is read."""

from __future__ import annotations

from collections.abc import Sequence

from turnstream.batching.config import BatchingConfig
from turnstream.batching.filters import has_zero_variance
from turnstream.batching.lengths import is_masked, length_problem
from turnstream.batching.rewards import planned_reward, reward_problem
from turnstream.types import SealedTrajectory


def problem_of(sealed: SealedTrajectory, config: BatchingConfig) -> str:
    """Why a sealed trajectory can be no member of its group; empty if it can."""
    if not sealed.turns:
        return "has no turn"
    return reward_problem(sealed, config) or length_problem(sealed, config)


def teaches_nothing(compared: Sequence[SealedTrajectory], config: BatchingConfig) -> bool:
    """Whether all rewards are equal, those of masked members that are in the baseline included.

    A group with less than two members that train a token has too few to say so, and is kept.
    """
    num_live = sum(_is_live(member, config) for member in compared)
    if num_live < 2:
        return False
    if config.estimator != "gdpo":
        return has_zero_variance([planned_reward(member, config) for member in compared])
    return all(
        has_zero_variance([member.reward_components[name] for member in compared])
        for name, _ in config.component_weights
    )


def _is_live(member: SealedTrajectory, config: BatchingConfig) -> bool:
    """Whether it trains a token."""
    return not is_masked(member, config) and any(turn.num_trained_tokens for turn in member.turns)
