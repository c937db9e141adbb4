from __future__ import annotations

import pickle
from typing import Any, get_args

import pytest

from turnstream.batching.config import BatchingConfig, Estimator
from turnstream.errors import InvalidConfigError, UnsupportedEstimatorError

TWO = (("accuracy", 1.0), ("format", 0.5))


def make(**fields: Any) -> BatchingConfig:
    return BatchingConfig(**{"batch_groups": 4, "mini_batch_groups": 2, **fields})


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_takes_every_estimator_that_a_plan_can_compute(estimator: str) -> None:
    weights = TWO if estimator == "gdpo" else ()

    assert make(estimator=estimator, component_weights=weights).estimator == estimator


@pytest.mark.parametrize("estimator", ["gae", "gigpo"])
def test_refuses_by_name_an_estimator_that_needs_more_than_the_plan_knows(estimator: str) -> None:
    with pytest.raises(
        UnsupportedEstimatorError, match=rf"^{estimator}: it needs .* use turnstream"
    ):
        make(estimator=estimator)


@pytest.mark.parametrize("source", ["sum_of_turns", "last_turn"])
def test_refuses_token_returns_where_rewards_come_inside_a_trajectory(source: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"reward_source: .*reinforce_pp"):
        make(estimator="reinforce_pp", reward_source=source)


def test_keeps_component_weights_in_order_of_name() -> None:
    config = make(estimator="gdpo", component_weights=[["format", 1], ["accuracy", 2]])

    assert config.component_weights == (("accuracy", 2.0), ("format", 1.0))


@pytest.mark.parametrize(
    "fields",
    [
        {"estimator": "gdpo"},
        {"estimator": "gdpo", "component_weights": TWO[:1]},
        {"estimator": "grpo", "component_weights": TWO},
        {"estimator": "grpo", "component_weights": TWO[:1]},
        {"estimator": "gdpo", "component_weights": (*TWO, ("format", 2.0))},
        {"estimator": "gdpo", "component_weights": (*TWO, ("", 2.0))},
        {"estimator": "gdpo", "component_weights": (*TWO, ("x", float("nan")))},
        {"estimator": "gdpo", "component_weights": (*TWO, ("x", "heavy"))},
        {"estimator": "gdpo", "component_weights": 7},
    ],
)
def test_refuses_component_weights_that_do_not_go_with_the_estimator(
    fields: dict[str, Any],
) -> None:
    with pytest.raises(InvalidConfigError, match=r"^component_weights: "):
        make(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_groups", 0),
        ("batch_groups", True),
        ("mini_batch_groups", 3),
        ("mini_batch_groups", 1.5),
        ("estimator", "best"),
        ("reward_source", "somewhere"),
        ("singleton_advantage", "one"),
        ("aggregation", "sum"),
        ("length_constant", 5),
        ("max_planned_ahead", -1),
    ],
)
def test_refuses_a_wrong_value_by_the_name_of_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{field}: .*{value}"):
        make(**{field: value})


def test_refuses_planning_ahead_of_weights_that_must_be_fresh() -> None:
    with pytest.raises(InvalidConfigError, match="max_planned_ahead"):
        make(max_staleness=0, max_planned_ahead=1)


def test_refuses_a_constant_length_without_its_constant() -> None:
    with pytest.raises(InvalidConfigError, match="length_constant"):
        make(aggregation="constant")


def test_a_refusal_survives_pickling() -> None:
    with pytest.raises(UnsupportedEstimatorError) as caught:
        make(estimator="gae")

    again = pickle.loads(pickle.dumps(caught.value))

    assert (type(again), again.args) == (UnsupportedEstimatorError, caught.value.args)
