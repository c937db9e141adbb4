"""Settings with which no batch would ever come are refused, each naming field and value."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream.batching.config import BatchingConfig
from turnstream.errors import InvalidConfigError

NOTHING = (("accuracy", 0.0), ("format", 0))
TINY = {"over_long": "refuse", "micro_batch_cost": "quadratic", "cost_per_token": 3.0}


def make(**fields: Any) -> BatchingConfig:
    return BatchingConfig(**{"batch_groups": 4, "mini_batch_groups": 2, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"max_open_groups": 3, "surplus": "keep"},
            r"^max_open_groups: 3 with surplus='keep' never fills a batch of batch_groups=4",
        ),
        (
            {"max_tokens_per_micro_batch": 1, "over_long": "refuse"},
            r"^max_tokens_per_micro_batch: 1 with over_long='refuse' refuses every trajectory",
        ),
        ({"max_tokens_per_micro_batch": 5, **TINY}, "the shortest row, of 2 tokens, costs 6$"),
        (
            {"estimator": "gdpo", "component_weights": NOTHING},
            r"^component_weights: \(\('accuracy', 0\.0\), \('format', 0\.0\)\) are all 0",
        ),
        ({"max_open_groups": -1}, "^max_open_groups: -1 is not a whole number of at least 0"),
        ({"max_open_groups": 1.5}, r"^max_open_groups: 1\.5 is not a whole number"),
        (
            {"max_staleness": 0, "max_planned_ahead": 0, "max_age_policy": "drop"},
            r"^max_age_policy: 'drop' needs max_staleness >= 1",
        ),
    ],
)
def test_refuses_what_can_never_train(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        make(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_open_groups": 1},
        {"max_open_groups": 4, "surplus": "keep"},
        {"max_open_groups": 0, "surplus": "keep"},
        {"max_tokens_per_micro_batch": 2, "over_long": "refuse"},
        {"max_tokens_per_micro_batch": 6, **TINY},
        {"max_tokens_per_micro_batch": 1},
        {"estimator": "gdpo", "component_weights": (("accuracy", 0.0), ("format", -1.0))},
    ],
)
def test_takes_what_can(fields: dict[str, Any]) -> None:
    make(**fields)
