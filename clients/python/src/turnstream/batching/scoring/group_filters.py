"""Judgement of complete groups by the group filters of a run.

Only members that are compared are judged, so masked ones with `masked_reward="leave_out"` are not.
A number is compared before the penalty of long responses. A reason ends with the judged value in
parentheses, so that the ledger counts groups with one reason and several values together::

    all values of the reward are equal (1)
    the mean of metric 'accuracy' is below low=0.2 (0.125)
    metric 'accuracy' is missing (sample 3)
    none of its tokens is trained
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from turnstream.batching.config import BatchingConfig, GroupFilter
from turnstream.batching.scoring.advantages import gigpo
from turnstream.batching.scoring.filters import (
    ZERO_VARIANCE_TOLERANCE,
    has_zero_variance,
    is_masked,
)
from turnstream.batching.scoring.rewards import (
    MAX_REWARD,
    raw_reward,
    raw_turn_rewards,
    turn_anchors,
)
from turnstream.types import SealedTrajectory

NOT_TRAINED: Final = "none of its tokens is trained"


def filter_reason(compared: Sequence[SealedTrajectory], config: BatchingConfig) -> str:
    """Return why a complete group is not trained, by its compared members; empty to train it.

    A group without a trained token is filtered in every run: a batch of such groups has no
    denominator. A member without the judged number, or with one that is not finite, filters its
    group.
    """
    if not any(_is_live(member, config) for member in compared):
        return NOT_TRAINED
    for each in config.group_filters:
        reason = _reason(each, compared, config)
        if reason:
            return reason
    return ""


def judged_value(
    each: GroupFilter, member: SealedTrajectory, config: BatchingConfig
) -> float | None:
    """Return the number of a member that the filter judges; None where it has none."""
    if each.metric:
        value = member.metrics.get(each.metric)
    elif each.component:
        value = member.reward_components.get(each.component)
    else:
        value = raw_reward(member, config)
    return value if value is not None and abs(value) <= MAX_REWARD else None


def _reason(each: GroupFilter, compared: Sequence[SealedTrajectory], config: BatchingConfig) -> str:
    values: list[float] = []
    for member in compared:
        value = judged_value(each, member, config)
        if value is None:
            return f"{each.judged} is missing (sample {member.key.sample})"
        values.append(value)
    if each.kind == "mean_range":
        return _mean_reason(each, values)
    if not _are_equal(each, values, compared, config):
        return ""
    return f"all values of {each.judged} are equal ({_text(values[0])})"


def _mean_reason(each: GroupFilter, values: Sequence[float]) -> str:
    """Return why the mean is outside the range, with the tolerance of equal values."""
    mean = math.fsum(values) / len(values)
    if each.low is not None and mean < each.low - ZERO_VARIANCE_TOLERANCE:
        return f"the mean of {each.judged} is below low={_text(each.low)} ({_text(mean)})"
    if each.high is not None and mean > each.high + ZERO_VARIANCE_TOLERANCE:
        return f"the mean of {each.judged} is above high={_text(each.high)} ({_text(mean)})"
    return ""


def _are_equal(
    each: GroupFilter,
    values: Sequence[float],
    compared: Sequence[SealedTrajectory],
    config: BatchingConfig,
) -> bool:
    """Return whether the values of a group with two or more members that train a token are equal.

    With a greedy sample, which trains none, one such member is enough. Rewards of gdpo are equal if
    each of the components is. Those of gigpo are equal if those of turns that began in one state
    are equal too.
    """
    num_live = sum(_is_live(member, config) for member in compared)
    if num_live < (1 if config.has_greedy_sample else 2):
        return False
    if each.metric or each.component:
        return has_zero_variance(values)
    if config.estimator == "gdpo":
        names = [name for name, _ in config.component_weights]
        columns = [[member.reward_components[name] for member in compared] for name in names]
        return all(map(has_zero_variance, columns))
    return has_zero_variance(values) and not _turns_differ(compared, config)


def _turns_differ(compared: Sequence[SealedTrajectory], config: BatchingConfig) -> bool:
    if config.estimator != "gigpo" or not config.turn_weight:
        return False
    deviations = gigpo(
        np.zeros(len(compared)),
        turn_rewards=[np.array(raw_turn_rewards(member, config)) for member in compared],
        anchors=[*map(turn_anchors, compared)],
        gamma=config.turn_discount,
        divide_by_std=False,
    )
    return any(np.abs(own).max() > ZERO_VARIANCE_TOLERANCE for own in deviations)


def _is_live(member: SealedTrajectory, config: BatchingConfig) -> bool:
    return not is_masked(member, config) and any(turn.num_trained_tokens for turn in member.turns)


def _text(value: float) -> str:
    return f"{value:.10g}"
