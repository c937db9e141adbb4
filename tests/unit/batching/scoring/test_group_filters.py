"""Filters of complete groups: the judged number, the decision and its reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import ZERO_VARIANCE, config, sealed, shape
from testkit.runs.folds import fold, key, opened
from turnstream.batching.config import GroupFilter
from turnstream.batching.scoring.group_filters import NOT_TRAINED, filter_reason
from turnstream.errors import InvalidConfigError
from turnstream.types import Purpose, SealedTrajectory, Status, TrajectoryState

TOLERANCE = Fraction("1e-6")


def group(*rewards: float | None, **fields: Any) -> list[SealedTrajectory]:
    """Return members with these rewards, which are also metric m and component c, minus 1."""
    return [
        replace(
            sealed(sample=sample, reward=reward, **fields),
            metrics={} if reward is None else {"m": reward - 1},
            reward_components={} if reward is None else {"c": reward - 1},
        )
        for sample, reward in enumerate(rewards)
    ]


def reason(members: Sequence[SealedTrajectory], *filters: dict[str, Any], **fields: Any) -> str:
    of = replace(config(), group_filters=[GroupFilter(**each) for each in filters], **fields)
    return filter_reason(members, of)


EQUAL, MEAN = {"kind": "zero_variance"}, {"kind": "mean_range"}


@pytest.mark.parametrize(
    ("rewards", "given", "says"),
    [
        ((1.0, 1.0), EQUAL, "all values of the reward are equal (1)"),
        ((1.0, 0.0), EQUAL, ""),
        ((1.0,), EQUAL, ""),
        ((1.5, 1.5), {**EQUAL, "metric": "m"}, "all values of metric 'm' are equal (0.5)"),
        ((1.5, 1.5), {**EQUAL, "component": "c"}, "all values of component 'c' are equal (0.5)"),
        ((1.0, 0.0, 0.0, 0.0), {**MEAN, "low": 0.25}, ""),
        (
            (1.0, 0.0, 0.0, 0.0),
            {**MEAN, "low": 0.3},
            "the mean of the reward is below low=0.3 (0.25)",
        ),
        ((1.0, 1.0, 1.0, 0.0), {**MEAN, "low": 0.25, "high": 0.75}, ""),
        (
            (1.0, 1.0, 1.0, 0.5),
            {**MEAN, "low": 0.25, "high": 0.75},
            "the mean of the reward is above high=0.75 (0.875)",
        ),
        ((0.1, 0.1, 0.1), {**MEAN, "low": 0.1}, ""),  # their float sum / 3 is below 0.1
        ((7.0,), {**MEAN, "high": 6.5}, "the mean of the reward is above high=6.5 (7)"),
        (
            (1.0, 3.0),
            {**MEAN, "metric": "m", "high": 0.9},
            "the mean of metric 'm' is above high=0.9 (1)",
        ),
        (
            (1.0, 3.0),
            {**MEAN, "component": "c", "low": 2},
            "the mean of component 'c' is below low=2 (1)",
        ),
    ],
)
def test_group_is_filtered_with_number_value_and_limit(
    rewards: tuple[float, ...], given: dict[str, Any], says: str
) -> None:
    assert reason(group(*rewards), given) == says


def test_first_filter_that_holds_gives_the_reason() -> None:
    members = group(1.0, 1.0)
    low = {**MEAN, "low": 2}

    assert reason(members, EQUAL, low) == "all values of the reward are equal (1)"
    assert reason(members, low, EQUAL) == "the mean of the reward is below low=2 (1)"
    assert reason(members) == ""


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -1e31])
@pytest.mark.parametrize("kind", [EQUAL, {**MEAN, "low": 0.0}])
def test_group_with_a_member_without_the_number_is_filtered(kind: Any, value: Any) -> None:
    members = group(1.0, 0.0, 1.0)
    members[1] = replace(members[1], metrics={} if value is None else {"m": value})

    assert reason(members, {**kind, "metric": "m"}) == "metric 'm' is missing (sample 1)"
    assert "missing" not in reason(members, {**kind, "component": "c"})


@pytest.mark.parametrize(
    "shaping", [{"overlong_length": 4, "overlong_buffer": 2}, {"length_reward_weight": 1.0}]
)
def test_reward_is_judged_before_it_is_shaped(shaping: dict[str, Any]) -> None:
    # Sample 1 is a token longer: the penalty lowers both rewards, and the length reward differs.
    members = [sealed(sample=0), sealed(sample=1, turns=[shape(2, 4)])]

    assert reason(members, {**MEAN, "low": 0.9}, **shaping) == ""
    assert reason(members, EQUAL, **shaping) == "all values of the reward are equal (1)"


def test_reward_comes_from_the_source_of_the_run() -> None:
    members = [sealed(sample=s, turns=[shape()], turn_rewards=[0.5], reward=s) for s in (0, 1)]

    assert reason(members, EQUAL) == ""
    assert reason(members, EQUAL, reward_source="sum_of_turns") == (
        "all values of the reward are equal (0.5)"
    )


def test_gdpo_rewards_are_equal_if_all_components_are() -> None:
    gdpo: Any = {"estimator": "gdpo", "component_weights": (("a", 1.0), ("b", 1.0))}
    swapped = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}]
    members = [replace(sealed(sample=s), reward_components=swapped[s]) for s in (0, 1)]
    same = [replace(member, reward_components=swapped[0]) for member in members]

    assert reason(members, EQUAL, **gdpo) == ""
    assert reason(same, EQUAL, **gdpo) == "all values of the reward are equal (1)"
    assert reason(members, {**MEAN, "high": 0.5}, **gdpo) == (
        "the mean of the reward is above high=0.5 (1)"
    )


def test_masked_members_are_judged_as_masked_reward_says() -> None:
    members = [*group(1.0, 1.0), sealed(sample=2, reward=0.0, status=Status.TRUNCATED)]
    of = replace(config(), mask_truncated=True, group_filters=ZERO_VARIANCE)

    kept, _ = fold([opened(3), *members], of)
    left_out, (drop,) = fold([opened(3), *members], replace(of, masked_reward="leave_out"))

    assert (kept.num_ready, left_out.num_ready) == (1, 0)
    assert (drop.state, drop.keys) == (TrajectoryState.FILTERED, (key(0), key(1), key(2)))
    assert drop.reason == "all values of the reward are equal (1)"


def test_evaluation_is_not_filtered() -> None:
    of = replace(config(), group_filters=ZERO_VARIANCE)

    _, (ended,) = fold([opened(purpose=Purpose.EVAL), *group(1.0, 1.0)], of)

    assert ended.result.num_trajectories == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "7 is not a list of filters"),
        ([7], r"\[7\] is not a list of filters: 7 is no filter"),
        ([{"metric": "m"}], "is not a list of filters: .*'kind'"),
        ([{"kind": "mean"}], "kind='mean' is not one of zero_variance, mean_range"),
        ([{"kind": "zero_variance", "metric": 7}], "metric=7 is no name"),
        ([{"kind": "zero_variance", "metric": "m", "component": "c"}], "metric='m' and comp"),
        ([{"kind": "zero_variance", "low": 0.0}], "low=0.0 and high=None are for kind='mean_"),
        ([{"kind": "mean_range"}], "kind='mean_range' without low and high filters no group"),
        ([{"kind": "mean_range", "low": 1, "high": 0}], "low=1 is above high=0"),
        *[
            ([{"kind": "mean_range", "high": value}], "high=.* is no number of at most 1e\\+30")
            for value in (math.nan, math.inf, 10**400, True, "1")
        ],
        ([{"kind": "zero_variance"}] * 2, r"GroupFilter\(kind='zero_variance'.* comes twice"),
    ],
)
def test_wrong_group_filter_is_refused_with_its_value(given: Any, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"^group_filters: .*{message}"):
        replace(config(), group_filters=given)


def test_group_filters_keep_their_order_and_have_limits_as_floats() -> None:
    wide = {"kind": "mean_range", "metric": "m", "low": 0, "high": 1}
    narrow = GroupFilter(kind="zero_variance", component="c")
    given: Any = [wide, narrow]

    first, second = replace(config(), group_filters=given).group_filters

    assert repr((first.low, first.high)) == "(0.0, 1.0)"
    assert (first.judged, second.judged) == ("metric 'm'", "component 'c'")
    assert GroupFilter(kind="mean_range", low=1, high=1).judged == "the reward"


rewards = st.floats(-4, 4) | st.sampled_from([0.0, 0.5, 1.0, 1.0 + 1e-7, 1.0 + 1e-5])
limits = st.none() | rewards


@given(
    values=st.lists(rewards, min_size=1, max_size=6),
    trained=st.lists(st.booleans(), min_size=6, max_size=6),
    low=limits,
    high=limits,
)
def test_decision_is_that_of_exact_arithmetic(
    values: list[float], trained: list[bool], low: float | None, high: float | None
) -> None:
    members = [
        sealed(sample=s, reward=value, turns=[shape(trained=3 * trained[s])])
        for s, value in enumerate(values)
    ]
    exact = [Fraction(value) for value in values]
    mean, spread = sum(exact) / len(exact), max(exact) - min(exact)
    near = [abs(abs(mean - Fraction(limit)) - TOLERANCE) for limit in (low, high) if limit]
    if min([*near, abs(spread - TOLERANCE)]) < Fraction("1e-12"):
        return  # at the tolerance itself, rounding decides

    is_equal = reason(members, EQUAL)
    if not any(trained[: len(values)]):
        assert is_equal == reason(members, {**MEAN, "low": 0.0}) == NOT_TRAINED
        return

    assert bool(is_equal) == (sum(trained[: len(values)]) >= 2 and spread <= TOLERANCE)
    if (low, high) == (None, None) or (None not in (low, high) and low > high):  # pyright: ignore[reportOperatorIssue] -- both are numbers
        return
    is_outside = (low is not None and mean < Fraction(low) - TOLERANCE) or (
        high is not None and mean > Fraction(high) + TOLERANCE
    )
    assert bool(reason(members, {**MEAN, "low": low, "high": high})) == is_outside
