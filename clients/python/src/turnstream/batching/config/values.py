"""Single values of a configuration: each is checked and brought into its stored form."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

from turnstream.errors import InvalidConfigError

Estimator = Literal[
    "grpo",
    "grpo_population",
    "grpo_leave_one_out",
    "dr_grpo",
    "rloo",
    "maxrl",
    "opo",
    "gdpo",
    "gigpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
]
RewardSource = Literal["outcome", "sum_of_turns", "last_turn"]
SingletonAdvantage = Literal["zero", "raw"]
DeadlinePolicy = Literal["drop", "train_short", "refill"]
RefillFallback = Literal["drop", "train_short"]
Surplus = Literal["drop", "keep"]
Aggregation = Literal[
    "token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_mean",
    "constant",
    "rollout_mean",
    "prompt_mean",
]
RowWeights = Literal["per_row", "per_trajectory", "rollout_mean"]
MaskedReward = Literal["keep", "leave_out"]
MaxAgePolicy = Literal["drop", "mask", "keep"]
Selection = Literal["in_order", "oldest_weights", "ready_first"]

_LONGEST_S = 30 * 86_400.0  # a longer time is a mistake in the unit


def require_at_least(value: object, least: int, *, field: str) -> None:
    """Refuse a value that is not a whole number, or is too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidConfigError(field, f"{value!r} is not a whole number of at least {least}")


def checked_seconds(value: Any, *, least_s: float, field: str) -> float:
    """Return a number of seconds from `least_s` to 30 days."""
    if not _is_number(value) or not least_s <= value <= _LONGEST_S:
        raise InvalidConfigError(
            field, f"{value!r} is not a number of seconds from {least_s:g} to {_LONGEST_S:g}"
        )
    return float(value)


def checked_factor(value: Any, *, most: float, field: str) -> float:
    """Return a number from 0 to `most`."""
    if not _is_number(value) or not 0 <= value <= most:
        raise InvalidConfigError(field, f"{value!r} is not a number from 0 to {most:g}")
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
