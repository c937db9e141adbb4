"""Settings of estimators, of their normalisation and of rewards for length."""

from __future__ import annotations

import math
from typing import Any

import pytest

from turnstream.batching.config import BatchingConfig
from turnstream.errors import InvalidConfigError

GDPO = {"estimator": "gdpo", "component_weights": (("accuracy", 1.0), ("format", 0.5))}


def make(**fields: Any) -> BatchingConfig:
    return BatchingConfig(**{"batch_groups": 4, "mini_batch_groups": 2, **fields})


@pytest.mark.parametrize(
    ("field", "kind", "values"),
    [
        ("pass_k", "whole number from 1 to 8192", [0, 8193, 2.0]),
        ("length_reward_weight", "number from 0 to 1000", [-0.1, 1001, math.nan]),
        ("correct_reward", "number from -1e\\+30 to 1e\\+30", [math.inf, math.nan, True]),
    ],
)
def test_number_outside_its_limits_is_refused(field: str, kind: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidConfigError, match=f"^{field}: {value!r} is not a {kind}"):
            make(**{field: value})


def test_number_in_place_of_a_metric_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match=r"^baseline_weight: 7 is no text"):
        make(estimator="opo", baseline_weight=7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pass_k": 2}, "pass_k: 2 does not go with estimator='grpo': only pass_at_k"),
        ({"baseline_weight": "w"}, "baseline_weight: w does not go with .*: only opo reads it"),
        (
            {"estimator": "pass_at_k"},
            "pass_k: 1 does not go with estimator='pass_at_k': it is from 2 .* by 'rloo'",
        ),
        (
            {"estimator": "pass_at_k", "pass_k": 9, "max_samples": 8},
            "pass_k: 9 .*: it is from 2 to max_samples=8",
        ),
        *[
            (
                {"estimator": estimator, "normalize_advantages": "batch", **fields},
                f"normalize_advantages: 'batch' .*='{estimator}': it normalises over the batch",
            )
            for estimator, fields in [
                ("reinforce_pp", {}),
                ("reinforce_pp_baseline", {}),
                ("gdpo", GDPO),
            ]
        ],
        (
            {"estimator": "maxrl", "length_reward_weight": 0.5},
            "length_reward_weight: 0.5 .*makes rewards negative",
        ),
        (
            {"length_reward_weight": 0.5, **GDPO},
            "length_reward_weight: 0.5 .*compares components one by one",
        ),
        ({"correct_reward": 0.5}, "correct_reward: 0.5 without length_reward_weight does nothing"),
        (
            {"estimator": "gae", "merge": False},
            "merge: False does not go with estimator='gae': it follows the tokens of all turns",
        ),
        (
            {"estimator": "gae", "length_reward_weight": 0.5},
            "length_reward_weight: 0.5 .*='gae': it depends on the group.* use overlong_buffer",
        ),
        (
            {"estimator": "gae", "normalize_advantages": "batch"},
            "normalize_advantages: 'batch' .*='gae': the trainer whitens",
        ),
    ],
)
def test_useless_or_contradicting_settings_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{message}"):
        make(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"estimator": "pass_at_k", "pass_k": 8, "max_samples": 8},
        {"estimator": "pass_at_k", "pass_k": 2, "normalize_advantages": "batch"},
        {"estimator": "opo", "baseline_weight": "energy", "normalize_advantages": "batch"},
        {"length_reward_weight": 0.5, "correct_reward": 0.5},
        {"estimator": "gae", "overlong_length": 9, "overlong_buffer": 3},
    ],
)
def test_settings_at_the_limit_of_a_rule_are_taken(fields: dict[str, Any]) -> None:
    config = make(**fields)

    assert {name: getattr(config, name) for name in fields} == fields
