"""Single values of a configuration: each is checked and brought into its stored form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_args, get_origin

from turnstream.errors import InvalidConfigError
from turnstream.types import Aggregation as Aggregation

Estimator = Literal[
    "grpo",
    "grpo_population",
    "grpo_leave_one_out",
    "dr_grpo",
    "rloo",
    "maxrl",
    "opo",
    "pass_at_k",
    "remax",
    "gdpo",
    "gigpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gae",
]
RewardSource = Literal["outcome", "sum_of_turns", "last_turn"]
SingletonAdvantage = Literal["zero", "raw"]
NormalizeAdvantages = Literal["none", "batch"]
DeadlinePolicy = Literal["drop", "train_short", "refill"]
RefillFallback = Literal["drop", "train_short"]
Surplus = Literal["drop", "keep"]
RowWeights = Literal["per_row", "per_trajectory", "rollout_mean"]
ErrorTrajectories = Literal["drop", "mask", "keep"]
MaskedReward = Literal["keep", "leave_out"]
MaxAgePolicy = Literal["drop", "mask", "keep"]
Selection = Literal["in_order", "oldest_weights", "ready_first"]


_Kind = TypeVar("_Kind")


class Limits(NamedTuple):
    """The numbers that a setting may have."""

    least: float
    most: float = math.inf


GREEDY_SAMPLE = 0
"""Sample of each group that the generator decodes greedily, where the estimator compares with it:
the number that every group has."""

LARGEST_GROUP = 4096
"""Samples of one group, at most: the store runs no other command while it opens a group."""

_LARGEST_SETTING = 8192  # of `max_samples`, which runs of earlier releases may have

MAX_TURN_WEIGHT = 1000.0
"""Times `MAX_REWARD` and the turns of a trajectory, it stays within float32."""

_LONGEST_S = 30 * 86_400.0  # a longer time is a mistake in the unit

Count = Annotated[int, Limits(0)]
Positive = Annotated[int, Limits(1)]
GroupSize = Annotated[int, Limits(1, _LARGEST_SETTING)]
LeaseTime = Annotated[float, Limits(0.3, _LONGEST_S)]
Seconds = Annotated[float, Limits(0, _LONGEST_S)]
TurnWeight = Annotated[float, Limits(0, MAX_TURN_WEIGHT)]
LengthWeight = Annotated[float, Limits(0, 1000)]
RewardBound = Annotated[float, Limits(-1e30, 1e30)]
Discount = Annotated[float, Limits(0, 1)]
Cost = Annotated[float, Limits(0, 1e12)]


def checked_value(value: Any, hint: Any, *, field: str) -> Any:
    """Return a value in its stored form; refuse unknown choices and numbers beyond the limits."""
    arguments: tuple[Any, ...] = get_args(hint)
    if get_origin(hint) is Literal and value not in arguments:
        raise InvalidConfigError(field, f"{value!r} is not one of {', '.join(arguments)}")
    if hint is str and not isinstance(value, str):
        raise InvalidConfigError(field, f"{value!r} is no text")
    if hint is bool and not isinstance(value, bool):
        raise InvalidConfigError(field, f"{value!r} is neither true nor false")
    if get_origin(hint) is not Annotated:
        return value
    kind, (least, most) = arguments
    is_number = isinstance(value, int if kind is int else int | float)
    if not is_number or isinstance(value, bool) or not least <= value <= most:
        number = "whole number" if kind is int else "number"
        limits = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise InvalidConfigError(field, f"{value!r} is not a {number} {limits}")
    return kind(value)


def checked_objects(given: object, kind: type[_Kind], *, field: str, noun: str) -> list[_Kind]:
    """Return values of a dataclass, also from the objects of stored JSON."""
    try:
        return [_object(each, kind, noun) for each in cast("Any", given)]
    except TypeError as error:
        raise InvalidConfigError(field, f"{given!r} is not a list of {noun}s: {error}") from error


def _object(given: object, kind: type[_Kind], noun: str) -> _Kind:
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"{given!r} is no {noun}")
    return kind(**cast("Mapping[str, Any]", given))


def checked_weights(given: object) -> tuple[tuple[str, float], ...]:
    """Return pairs of name and weight in order of name, also from the lists of stored JSON."""
    try:
        pairs = [(name, float(weight)) for name, weight in cast("Any", given)]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidConfigError(
            "component_weights", f"{given!r} is not a list of (name, weight)"
        ) from error
    for name, weight in pairs:
        if not isinstance(name, str) or not name or not math.isfinite(weight):
            raise InvalidConfigError("component_weights", f"{(name, weight)!r} in {given!r}")
    if len({name for name, _ in pairs}) < len(pairs):
        raise InvalidConfigError("component_weights", f"a name comes twice in {given!r}")
    return tuple(sorted(pairs))
