"""The one reward of a trajectory, and whether it has the one that the run's estimator needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.values import RewardSource
from turnstream.batching.scoring.filters import num_response_tokens, overlong_penalty
from turnstream.types import RewardPosted, SealedTrajectory

MAX_REWARD = 1e30
"""Beyond it advantages leave float32."""


def trajectory_reward(trajectory: SealedTrajectory, *, source: RewardSource) -> float | None:
    """The reward by its declared source; None if the trajectory has none."""
    match source:
        case "outcome":
            return trajectory.reward
        case "sum_of_turns":
            return _sum(trajectory.turn_rewards)
        case "last_turn":
            kept = trajectory.kept_turns
            return trajectory.turn_rewards[kept[-1]] if kept else None


def raw_reward(trajectory: SealedTrajectory, config: BatchingConfig) -> float:
    """Return the reward of a trajectory without a `reward_problem`, before any penalty.

    With gdpo it is the weighted sum of the components.
    """
    if config.estimator == "gdpo":
        components = trajectory.reward_components
        return _sum([weight * components[name] for name, weight in config.component_weights])
    reward = trajectory_reward(trajectory, source=config.reward_source)
    assert reward is not None
    return reward


def planned_reward(trajectory: SealedTrajectory, config: BatchingConfig) -> float:
    """Return the reward in the plan of a trajectory: the raw reward and the length penalty."""
    return raw_reward(trajectory, config) + length_penalty(trajectory, config)


def raw_turn_rewards(trajectory: SealedTrajectory, config: BatchingConfig) -> list[float]:
    """Return the reward of every kept turn; a reward of the outcome comes with the last one."""
    kept = trajectory.kept_turns
    if config.reward_source != "sum_of_turns":
        return [0.0] * (len(kept) - 1) + [raw_reward(trajectory, config)]
    return [trajectory.turn_rewards[turn] for turn in kept]


def turn_anchors(trajectory: SealedTrajectory) -> list[int | None]:
    """Return the state in which every kept turn began; None where it is unknown."""
    anchors = trajectory.anchors or (None,) * len(trajectory.turns)
    return [anchors[turn] for turn in trajectory.kept_turns]


def planned_turn_rewards(trajectory: SealedTrajectory, config: BatchingConfig) -> list[float]:
    """Return the reward of every kept turn, the penalty of a long response with the last."""
    *before, last = raw_turn_rewards(trajectory, config)
    return [*before, last + length_penalty(trajectory, config)]


def length_penalty(trajectory: SealedTrajectory, config: BatchingConfig) -> float:
    """Return the penalty of a long response that goes into the planned reward."""
    if not config.overlong_buffer:
        return 0.0
    return overlong_penalty(
        num_response_tokens(trajectory),
        max_tokens=config.overlong_length,
        buffer_tokens=config.overlong_buffer,
    )


def length_rewards(group: Sequence[SealedTrajectory], config: BatchingConfig) -> list[float]:
    """Return the length reward of every trajectory of a group, times its weight.

    Kimi k1.5 (arXiv:2501.12599): 1/2 - (L - min L) / (max L - min L), and for an incorrect response
    at most 0. L counts response tokens. In a group of equal lengths it is 0.
    """
    lengths = [num_response_tokens(trajectory) for trajectory in group]
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    if not config.length_reward_weight or shortest == longest:
        return [0.0] * len(group)
    rewards = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [
        config.length_reward_weight * (reward if _is_correct(each, config) else min(0.0, reward))
        for each, reward in zip(group, rewards, strict=True)
    ]


def _is_correct(trajectory: SealedTrajectory, config: BatchingConfig) -> bool:
    reward = trajectory_reward(trajectory, source=config.reward_source)
    return reward is not None and reward >= config.correct_reward


def with_posted_reward(sealed: SealedTrajectory, posted: RewardPosted) -> SealedTrajectory:
    """Return the trajectory with the reward that was posted after its seal."""
    components = {**sealed.reward_components, **posted.reward_components}
    return replace(
        sealed,
        reward=sealed.reward if posted.reward is None else posted.reward,
        reward_components=dict(sorted(components.items())),
        awaits_reward=False,
    )


def reward_problem(trajectory: SealedTrajectory, config: BatchingConfig) -> str:
    """Why this trajectory cannot be compared with the others of its group; empty if it can."""
    if config.estimator == "gdpo":
        values = [trajectory.reward_components.get(name) for name, _ in config.component_weights]
        for (name, _), value in zip(config.component_weights, values, strict=True):
            if value is None:
                return f"has no reward component {name!r}"
        values.append(planned_reward(trajectory, config))
    else:
        values = [trajectory_reward(trajectory, source=config.reward_source)]
        if values[0] is None:
            return f"has no reward, which reward_source={config.reward_source!r} needs"
        if (
            config.reward_source != "outcome"
            and trajectory.reward
            and not any(trajectory.turn_rewards)
        ):
            return (
                f"has an outcome reward of {trajectory.reward} and none in its turns, which "
                f"reward_source={config.reward_source!r} reads"
            )
    for value in values:
        if value is not None and not abs(value) <= MAX_REWARD:
            return f"has a reward of {value}"
        if value is not None and value < 0 and config.estimator == "maxrl":
            return f"has a reward of {value}, and maxrl divides by the mean reward"
    if config.estimator == "gigpo":
        return _turn_problem(trajectory, config)
    return _weight_problem(trajectory, config) if config.baseline_weight else ""


def _weight_problem(trajectory: SealedTrajectory, config: BatchingConfig) -> str:
    """Why this trajectory has no weight in a baseline; empty if it has."""
    name = config.baseline_weight
    weight = trajectory.metrics.get(name)
    if weight is None:
        return f"has no metric {name!r}, which baseline_weight={name!r} needs"
    return "" if 0 <= weight <= MAX_REWARD else f"has a weight of {weight} as its metric {name!r}"


def _turn_problem(trajectory: SealedTrajectory, config: BatchingConfig) -> str:
    """Why the turns of this trajectory cannot be compared with others; empty if they can."""
    rewards = planned_turn_rewards(trajectory, config)
    turns = zip(trajectory.kept_turns, turn_anchors(trajectory), rewards, strict=True)
    for index, anchor, reward in turns:
        if anchor is None:
            return f"has no anchor at turn {index}, which estimator='gigpo' needs"
        if not abs(reward) <= MAX_REWARD:
            return f"has a reward of {reward} at turn {index}"
    return ""


def _sum(values: Sequence[float]) -> float:
    """Return the exact sum; NaN where there is none."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return math.nan
