"""Rules that decide whether trajectories of a group can be compared and teach anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstream.batching.config import BatchingConfig
from turnstream.batching.scoring.advantages import gigpo
from turnstream.batching.scoring.filters import (
    ZERO_VARIANCE_TOLERANCE,
    has_zero_variance,
    is_masked,
    length_problem,
)
from turnstream.batching.scoring.rewards import planned_reward, planned_turn_rewards, reward_problem
from turnstream.types import SealedTrajectory


def problem_of(sealed: SealedTrajectory, config: BatchingConfig) -> str:
    """Return why a sealed trajectory can be no member of its group; empty if it can."""
    if not sealed.turns:
        return "has no turn"
    return reward_problem(sealed, config) or length_problem(sealed, config)


def teaches_nothing(compared: Sequence[SealedTrajectory], config: BatchingConfig) -> bool:
    """Return whether all compared rewards are equal; with gigpo also those of turns of one state.

    A group with less than two members that train a token is kept: it has too few to decide.
    """
    num_live = sum(_is_live(member, config) for member in compared)
    if num_live < 2:
        return False
    if config.estimator != "gdpo":
        rewards = [planned_reward(member, config) for member in compared]
        return has_zero_variance(rewards) and not _turns_differ(compared, config)
    return all(
        has_zero_variance([member.reward_components[name] for member in compared])
        for name, _ in config.component_weights
    )


def _turns_differ(compared: Sequence[SealedTrajectory], config: BatchingConfig) -> bool:
    if config.estimator != "gigpo" or not config.turn_weight:
        return False
    deviations = gigpo(
        np.zeros(len(compared)),
        turn_rewards=[np.array(planned_turn_rewards(member, config)) for member in compared],
        anchors=[member.anchors for member in compared],
        gamma=config.turn_discount,
        divide_by_std=False,
    )
    return any(np.abs(own).max() > ZERO_VARIANCE_TOLERANCE for own in deviations)


def _is_live(member: SealedTrajectory, config: BatchingConfig) -> bool:
    return not is_masked(member, config) and any(turn.num_trained_tokens for turn in member.turns)
