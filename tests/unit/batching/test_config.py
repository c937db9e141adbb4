from __future__ import annotations

import math
import pickle
from typing import Any, get_args

import pytest

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.values import Estimator
from turnstream.batching.packing.microbatch import Budget, CostModel
from turnstream.errors import InvalidConfigError, UnsupportedEstimatorError

TWO = (("accuracy", 1.0), ("format", 0.5))


def make(**fields: Any) -> BatchingConfig:
    return BatchingConfig(**{"batch_groups": 4, "mini_batch_groups": 2, **fields})


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_takes_every_estimator_that_a_plan_can_compute(estimator: str) -> None:
    weights = TWO if estimator == "gdpo" else ()

    assert make(estimator=estimator, component_weights=weights).estimator == estimator


def test_estimator_that_needs_more_than_the_plan_has_is_refused() -> None:
    with pytest.raises(
        UnsupportedEstimatorError,
        match=r"^gae: it needs a critic's value .* turnstream\.batching\.scoring\.token_adv",
    ):
        make(estimator="gae")


def test_takes_the_settings_of_gigpo_as_numbers() -> None:
    config = make(estimator="gigpo", turn_weight=2, turn_discount=1, divide_by_std=False)

    assert repr((config.turn_weight, config.turn_discount)) == "(2.0, 1.0)"
    assert not config.divide_by_std


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("turn_weight", -0.1, "-0.1 is not a number from 0 to 1000"),
        ("turn_weight", 1001, "1001 is not a number from 0 to 1000"),
        ("turn_weight", math.nan, "nan is not a number from 0 to 1000"),
        ("turn_discount", 1.01, "1.01 is not a number from 0 to 1"),
        ("turn_discount", True, "True is not a number from 0 to 1"),
    ],
)
def test_refuses_settings_of_gigpo_that_no_turn_can_have(field: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{field}: {says}$"):
        make(estimator="gigpo", **{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("turn_weight", 0.5), ("turn_discount", 0.9), ("divide_by_std", False)]
)
def test_refuses_settings_of_gigpo_beside_an_estimator_that_does_not_read_them(
    field: str, value: Any
) -> None:
    says = f"^{field}: {value} does not go with estimator='grpo': only gigpo reads it"
    with pytest.raises(InvalidConfigError, match=says):
        make(**{field: value})


@pytest.mark.parametrize("source", ["sum_of_turns", "last_turn"])
def test_refuses_token_returns_where_rewards_come_inside_a_trajectory(source: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"reward_source: .*reinforce_pp"):
        make(estimator="reinforce_pp", reward_source=source)


def test_seconds_may_be_whole_numbers() -> None:
    assert make(lease_s=30, takeover_s=5) == make(lease_s=30.0, takeover_s=5.0)
    assert repr(make(lease_s=30)) == repr(make(lease_s=30.0))


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
        {"estimator": "gdpo", "component_weights": ((1, 2.0), (2, 2.0))},
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
        ("max_staleness", 1.5),
        ("estimator", "best"),
        ("reward_source", "somewhere"),
        ("singleton_advantage", "one"),
        ("aggregation", "sum"),
        ("length_constant", 5),
        ("row_weights", "per_token"),
        ("micro_batch_cost", "cubic"),
        ("cost_per_token", "much"),
        ("over_long", "cut"),
        ("alignment", 0),
        ("passes_multiple_of", 0),
        ("overlong_length", -1),
        ("masked_reward", "half"),
        ("max_age_policy", "burn"),
        ("selection", "random"),
        ("rows_multiple_of", 0),
        ("max_planned_ahead", -1),
        ("lease_s", 0.29),
        ("lease_s", float("nan")),
        ("lease_s", float("inf")),
        ("lease_s", True),
        ("lease_s", "60"),
        ("lease_s", 60_000_000),
        ("max_bytes", -1),
        ("max_bytes", 4 * 4096 - 1),
        ("takeover_s", -0.1),
        ("takeover_s", None),
    ],
)
def test_refuses_a_wrong_value_by_the_name_of_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{field}: .*{value}"):
        make(**{field: value})


@pytest.mark.parametrize(
    ("aggregation", "reason"),
    [
        ("token_mean", "counts tokens alike"),
        ("rollout_mean", "divides by the trajectory's tokens already"),
        ("prompt_mean", "divides by the group's tokens already"),
    ],
)
@pytest.mark.parametrize("row_weights", ["per_trajectory", "rollout_mean"])
def test_row_weights_without_division_by_their_sum_are_refused(
    aggregation: str, reason: str, row_weights: str
) -> None:
    with pytest.raises(InvalidConfigError, match=f"^row_weights: '{row_weights}' .*{reason}"):
        make(aggregation=aggregation, row_weights=row_weights)


@pytest.mark.parametrize(
    "fields",
    [{"aggregation": "seq_mean_token_sum"}, {"aggregation": "constant", "length_constant": 8}],
)
def test_refuses_weights_by_length_where_rows_count_by_length_already(
    fields: dict[str, Any],
) -> None:
    assert make(row_weights="per_trajectory", **fields).row_weights == "per_trajectory"
    with pytest.raises(InvalidConfigError, match=r"^row_weights: .*length twice"):
        make(row_weights="rollout_mean", **fields)


@pytest.mark.parametrize("model", ["padded", "packed"])
@pytest.mark.parametrize("field", ["cost_per_token", "cost_per_squared_token"])
def test_refuses_costs_that_only_a_quadratic_model_reads(model: str, field: str) -> None:
    assert make(micro_batch_cost="quadratic", **{field: 2}).budget.model == "quadratic"
    with pytest.raises(InvalidConfigError, match=f"^{field}: 2.0 .*'{model}'"):
        make(micro_batch_cost=model, **{field: 2})


@pytest.mark.parametrize("field", ["cost_per_token", "cost_per_squared_token"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e13, True, "2", None])
def test_refuses_a_cost_that_is_no_number_of_a_cost(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfigError, match=rf"^{field}: {value!r} is not a number from 0"):
        make(micro_batch_cost="quadratic", **{field: value})


@pytest.mark.parametrize(
    ("field", "fields", "reason"),
    [
        ("max_planned_ahead", {"max_staleness": 0, "max_planned_ahead": 1}, ""),
        ("length_constant", {"aggregation": "constant"}, ""),
        ("over_long", {"over_long": "refuse"}, "'refuse' without max_tokens"),
        ("overlong_buffer", {"overlong_buffer": 5, "overlong_length": 4}, "more than"),
        ("overlong_length", {"overlong_length": 4}, "does nothing"),
        ("masked_reward", {"masked_reward": "leave_out"}, "without mask_truncated does nothing"),
        (
            "overlong_buffer",
            {"overlong_buffer": 2, "overlong_length": 4, "estimator": "maxrl"},
            "makes rewards negative",
        ),
        (
            "overlong_buffer",
            {
                "overlong_buffer": 2,
                "overlong_length": 4,
                "estimator": "gdpo",
                "component_weights": TWO,
            },
            "give the penalty as one of them",
        ),
    ],
)
def test_useless_or_contradicting_settings_are_refused(
    field: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{field}: .*{reason}"):
        make(**fields)


@pytest.mark.parametrize("name", ["drop", "mask"])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_staleness": 0, "max_planned_ahead": 0}, "needs max_staleness >= 1"),
        (
            {"max_staleness": 1, "max_planned_ahead": 2},
            "with max_planned_ahead=2 expires everything",
        ),
    ],
)
def test_refuses_ages_that_nothing_can_have(name: str, fields: Any, reason: str) -> None:
    assert make(**fields).max_age_policy == "keep"
    assert make(max_age_policy=name, max_staleness=2, max_planned_ahead=2).max_staleness == 2
    with pytest.raises(InvalidConfigError, match=f"^max_age_policy: '{name}' {reason}"):
        make(max_age_policy=name, **fields)


def test_a_pass_may_cost_what_the_run_says() -> None:
    config = make(
        max_tokens_per_micro_batch=70,
        micro_batch_cost="quadratic",
        cost_per_token=6,
        cost_per_squared_token=1,
    )

    assert config.budget.limit == 70
    assert config.budget.cost([4, 2]) == 6 * 4 + 4 * 4 + 6 * 2 + 2 * 2


@pytest.mark.parametrize("model", get_args(CostModel))
def test_a_pass_costs_by_the_model_and_the_alignment_of_the_run(model: CostModel) -> None:
    config = make(micro_batch_cost=model, alignment=4, max_tokens_per_micro_batch=64)

    assert config.budget == Budget(limit=64, model=model, alignment=4)


def test_event_chooses_groups_if_age_or_order_count() -> None:
    assert not make().chooses_by_event
    assert make(selection="oldest_weights").chooses_by_event
    assert make(max_age_policy="mask").chooses_by_event


def test_a_refusal_survives_pickling() -> None:
    with pytest.raises(UnsupportedEstimatorError) as caught:
        make(estimator="gae")

    again = pickle.loads(pickle.dumps(caught.value))

    assert (type(again), again.args) == (UnsupportedEstimatorError, caught.value.args)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"group_deadline_s": -1}, "group_deadline_s"),
        ({"group_deadline_s": "soon"}, "group_deadline_s"),
        ({"reward_deadline_s": float("nan")}, "reward_deadline_s"),
        ({"reward_deadline_s": float("inf")}, "reward_deadline_s"),
        ({"reward_deadline_s": True}, "reward_deadline_s"),
        ({"deadline_policy": "hope"}, "deadline_policy"),
        ({"deadline_policy": "train_short"}, "deadline_policy"),
        ({"deadline_policy": "refill"}, "max_refills"),
        ({"max_refills": 2}, "max_refills"),
        ({"max_refills": -1}, "max_refills"),
        ({"refill_fallback": "refill"}, "refill_fallback"),
        ({"surplus": "sell"}, "surplus"),
    ],
)
def test_impossible_deadlines_and_policies_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{field}: "):
        make(**fields)


@pytest.mark.parametrize("field", ["group_deadline_s", "reward_deadline_s"])
def test_groups_train_short_after_a_deadline_of_either_kind(field: str) -> None:
    assert make(deadline_policy="train_short", **{field: 1}).deadline_policy == "train_short"
