from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.values import Estimator
from turnstream.batching.packing.microbatch import Budget
from turnstream.errors import InvalidConfigError, UnsupportedEstimatorError
from turnstream.types import DeclaredColumn

TWO = (("accuracy", 1.0), ("format", 0.5))
ZEROS = (("accuracy", 0.0), ("format", 0))
GDPO = {"estimator": "gdpo", "component_weights": TWO}
OF_EIGHT = {"estimator": "pass_at_k", "max_samples": 8}
OVERLONG = {"overlong_buffer": 2, "overlong_length": 4}
TINY = {"over_long": "refuse", "micro_batch_cost": "quadratic", "cost_per_token": 3.0}


def make(**fields: Any) -> BatchingConfig:
    return BatchingConfig(**{"batch_groups": 4, "mini_batch_groups": 2, **fields})


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_config_takes_every_estimator_that_a_plan_can_compute(estimator: str) -> None:
    needed = {"gdpo": {"component_weights": TWO}, "pass_at_k": {"pass_k": 2}}

    config = make(estimator=estimator, **needed.get(estimator, {}))

    assert config.estimator == estimator
    assert config.has_greedy_sample == (estimator == "remax")


def test_estimator_that_needs_more_than_the_plan_has_is_refused() -> None:
    with pytest.raises(
        UnsupportedEstimatorError,
        match=r"^optimal_token_baseline: it needs the probabilities .* use 'opo'",
    ) as caught:
        make(estimator="optimal_token_baseline")

    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.args) == (UnsupportedEstimatorError, caught.value.args)


def test_values_are_stored_in_one_form() -> None:
    numbers = make(estimator="gigpo", turn_weight=2, turn_discount=1, lease_s=30, takeover_s=5)
    weights = make(estimator="gdpo", component_weights=[["format", 1], ["accuracy", 2]])

    assert repr((numbers.turn_weight, numbers.turn_discount)) == "(2.0, 1.0)"
    assert repr((numbers.lease_s, numbers.takeover_s)) == "(30.0, 5.0)"
    assert weights.component_weights == (("accuracy", 2.0), ("format", 1.0))


POSITIVE, COUNT = "whole number of at least 1", "whole number of at least 0"
SECONDS, COST = "number from 0 to 2.592e\\+06", "number from 0 to 1e\\+12"


@pytest.mark.parametrize(
    ("field", "kind", "values"),
    [
        ("batch_groups", POSITIVE, [0, True]),
        ("mini_batch_groups", POSITIVE, [1.5]),
        ("alignment", POSITIVE, [0]),
        ("passes_multiple_of", POSITIVE, [0]),
        ("rows_multiple_of", POSITIVE, [0]),
        ("max_staleness", COUNT, [1.5]),
        ("max_open_groups", COUNT, [-1]),
        ("overlong_length", COUNT, [-1]),
        ("max_planned_ahead", COUNT, [-1]),
        ("max_refills", COUNT, [-1]),
        ("max_bytes", COUNT, [-1]),
        ("max_samples", "whole number from 1 to 8192", [8193]),
        (
            "lease_s",
            "number from 0.3 to 2.592e\\+06",
            [0.29, math.nan, math.inf, True, "60", 60_000_000],
        ),
        ("takeover_s", SECONDS, [-0.1, None]),
        ("group_deadline_s", SECONDS, [-1, "soon"]),
        ("reward_deadline_s", SECONDS, [math.nan, math.inf, True]),
        ("turn_weight", "number from 0 to 1000", [-0.1, 1001, math.nan]),
        ("turn_discount", "number from 0 to 1", [1.01, True]),
        ("cost_per_token", COST, [-1.0, math.nan, math.inf, 1e13, True, "2", None]),
        ("cost_per_squared_token", COST, [-1.0, 1e13]),
        ("pass_k", "whole number from 1 to 8192", [0, 8193, 2.0]),
        ("length_reward_weight", "number from 0 to 1000", [-0.1, 1001, math.nan]),
        ("correct_reward", "number from -1e\\+30 to 1e\\+30", [math.inf, math.nan, True]),
    ],
)
def test_number_outside_its_limits_is_refused(field: str, kind: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidConfigError, match=f"^{field}: {value!r} is not a {kind}"):
            make(**{field: value})


@pytest.mark.parametrize(
    "field",
    [name for name, hint in get_type_hints(BatchingConfig).items() if get_origin(hint) is Literal],
)
def test_unknown_choice_is_refused(field: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{field}: 'burn' is not one of "):
        make(**{field: "burn"})


def test_number_in_place_of_a_truth_value_or_name_is_refused() -> None:
    for field in ("divide_by_std", "merge", "mask_truncated"):
        with pytest.raises(InvalidConfigError, match=f"^{field}: 1 is neither true nor false"):
            make(**{field: 1})
    with pytest.raises(InvalidConfigError, match=r"^baseline_weight: 7 is no text"):
        make(estimator="opo", baseline_weight=7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *[
            ({field: value}, f"{field}: {value} does not go with estimator='grpo': only gigpo")
            for field, value in [
                ("turn_weight", 0.5),
                ("turn_discount", 0.9),
                ("divide_by_std", False),
            ]
        ],
        *[
            ({"micro_batch_cost": model, field: 2}, f"{field}: 2.0 .*'{model}': only quadratic")
            for model in ("padded", "packed")
            for field in ("cost_per_token", "cost_per_squared_token")
        ],
        *[
            ({"estimator": "reinforce_pp", "reward_source": source}, f"reward_source: '{source}'")
            for source in ("sum_of_turns", "last_turn")
        ],
        *[
            (
                {"aggregation": aggregation, "row_weights": "per_trajectory"},
                f"row_weights: 'per_trajectory' .*{reason}",
            )
            for aggregation, reason in [
                ("token_mean", "counts tokens alike"),
                ("rollout_mean", "divides by the trajectory's tokens already"),
                ("prompt_mean", "divides by the group's tokens already"),
            ]
        ],
        *[
            ({"row_weights": "rollout_mean", **fields}, "row_weights: .*length twice")
            for fields in [
                {"aggregation": "seq_mean_token_sum"},
                {"aggregation": "constant", "length_constant": 8},
            ]
        ],
        *[
            ({"estimator": estimator, "component_weights": weights}, "component_weights: ")
            for estimator, weights in [
                ("gdpo", ()),
                ("gdpo", TWO[:1]),
                ("grpo", TWO),
                ("grpo", TWO[:1]),
                ("gdpo", (*TWO, ("format", 2.0))),
                ("gdpo", (*TWO, ("", 2.0))),
                ("gdpo", ((1, 2.0), (2, 2.0))),
                ("gdpo", (*TWO, ("x", float("nan")))),
                ("gdpo", (*TWO, ("x", "heavy"))),
                ("gdpo", 7),
            ]
        ],
        ({"mini_batch_groups": 3}, "mini_batch_groups: 3 does not divide batch_groups=4"),
        ({"max_bytes": 4 * 4096 - 1}, "max_bytes: 16383 never holds the 4 groups of a step"),
        (
            {"max_open_groups": 3, "surplus": "keep"},
            "max_open_groups: 3 with surplus='keep' never fills a batch of batch_groups=4",
        ),
        (
            {"estimator": "gdpo", "component_weights": ZEROS},
            r"component_weights: \(\('accuracy', 0\.0\), \('format', 0\.0\)\) are all 0",
        ),
        (
            {"max_staleness": 0, "max_planned_ahead": 1},
            "max_planned_ahead: 1 plans from older weights, but max_staleness is 0",
        ),
        ({"length_constant": 5}, "length_constant: 5 does not go with aggregation='token_mean'"),
        ({"aggregation": "constant"}, "length_constant: 0 does not go with"),
        ({"over_long": "refuse"}, "over_long: 'refuse' without max_tokens_per_micro_batch"),
        (
            {"max_tokens_per_micro_batch": 1, "over_long": "refuse"},
            "max_tokens_per_micro_batch: 1 with over_long='refuse' refuses every trajectory",
        ),
        (
            {"max_tokens_per_micro_batch": 5, **TINY},
            "max_tokens_per_micro_batch: .*the shortest row, of 2 tokens, costs 6$",
        ),
        (
            {"packing_method": "next_fit", "micro_batch_cost": "packed"},
            "packing_method: 'next_fit' without max_tokens_per_micro_batch packs nothing",
        ),
        (
            {"packing_method": "first_fit", "max_tokens_per_micro_batch": 9},
            "packing_method: 'first_fit' does not go with micro_batch_cost='padded'",
        ),
        (
            {"overlong_buffer": 5, "overlong_length": 4},
            "overlong_buffer: 5 is more than overlong_length=4",
        ),
        ({"overlong_length": 4}, "overlong_length: 4 .*does nothing"),
        ({"masked_reward": "leave_out"}, "masked_reward: .*without mask_truncated and .*nothing"),
        ({**OVERLONG, "estimator": "maxrl"}, "overlong_buffer: 2 .*makes rewards negative"),
        ({**OVERLONG, **GDPO}, "overlong_buffer: 2 .*give the penalty as one of them"),
        *[
            ({"max_age_policy": policy, **fields}, f"max_age_policy: '{policy}' {message}")
            for policy in ("drop", "mask")
            for fields, message in [
                ({"max_staleness": 0, "max_planned_ahead": 0}, "needs max_staleness >= 1"),
                (
                    {"max_staleness": 1, "max_planned_ahead": 2},
                    "with max_planned_ahead=2 expires everything",
                ),
            ]
        ],
        ({"deadline_policy": "train_short"}, "deadline_policy: 'train_short' needs"),
        ({"deadline_policy": "refill"}, "max_refills: 0 does not go with"),
        ({"max_refills": 2}, "max_refills: 2 does not go with deadline_policy='drop'"),
        ({"pass_k": 2}, "pass_k: 2 does not go with estimator='grpo': only pass_at_k"),
        ({"baseline_weight": "w"}, "baseline_weight: w does not go with .*: only opo reads it"),
        (
            {"estimator": "pass_at_k"},
            "pass_k: 1 does not go with estimator='pass_at_k': it is from 2 .* by 'rloo'",
        ),
        ({**OF_EIGHT, "pass_k": 9}, "pass_k: 9 .*: it is from 2 to max_samples=8"),
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
        {"micro_batch_cost": "quadratic", "cost_per_token": 2, "cost_per_squared_token": 2},
        {"row_weights": "per_trajectory", "aggregation": "seq_mean_token_sum"},
        {"row_weights": "per_trajectory", "aggregation": "constant", "length_constant": 8},
        {"error_trajectories": "mask", "masked_reward": "leave_out"},
        {"max_open_groups": 1},
        {"max_open_groups": 4, "surplus": "keep"},
        {"max_open_groups": 0, "surplus": "keep"},
        {"max_bytes": 4 * 4096},
        {"max_tokens_per_micro_batch": 2, "over_long": "refuse"},
        {"max_tokens_per_micro_batch": 6, **TINY},
        {"max_tokens_per_micro_batch": 1},
        {"estimator": "gdpo", "component_weights": (("accuracy", 0.0), ("format", -1.0))},
        {"max_staleness": 1, "max_planned_ahead": 2},
        {"max_age_policy": "drop", "max_staleness": 2, "max_planned_ahead": 2},
        {"max_age_policy": "mask", "max_staleness": 2, "max_planned_ahead": 2},
        {"deadline_policy": "train_short", "group_deadline_s": 1},
        {"deadline_policy": "train_short", "reward_deadline_s": 1},
        {**OF_EIGHT, "pass_k": 8},
        {"estimator": "pass_at_k", "pass_k": 2, "normalize_advantages": "batch"},
        {"estimator": "opo", "baseline_weight": "energy", "normalize_advantages": "batch"},
        {"length_reward_weight": 0.5, "correct_reward": 0.5},
        {"estimator": "gae", "overlong_length": 9, "overlong_buffer": 3},
    ],
)
def test_settings_at_the_limit_of_a_rule_are_taken(fields: dict[str, Any]) -> None:
    config = make(**fields)

    assert {name: getattr(config, name) for name in fields} == fields


def test_budget_has_the_limits_costs_and_methods_of_the_run() -> None:
    quadratic = make(
        max_tokens_per_micro_batch=70,
        micro_batch_cost="quadratic",
        cost_per_token=6,
        cost_per_squared_token=1,
    )
    packed = make(
        micro_batch_cost="packed",
        max_tokens_per_micro_batch=64,
        alignment=4,
        packing_method="next_fit",
        balance_method="none",
        pass_order="as_packed",
    )

    assert quadratic.budget == Budget(limit=70, model="quadratic", a=6, b=1)
    methods: Any = {"packing": "next_fit", "balancing": "none", "order": "as_packed"}
    assert packed.budget == Budget(limit=64, model="packed", alignment=4, **methods)


def test_event_chooses_groups_if_age_or_order_count() -> None:
    assert not make().chooses_by_event
    assert make(selection="oldest_weights").chooses_by_event
    assert make(max_age_policy="mask").chooses_by_event


ROUTES = DeclaredColumn(name="routes", per="first_tokens", dtype="uint8", shape=(2, 4))
STYLE = DeclaredColumn(name="style", per="row", dtype="float32", shape=(3,))


def column(**fields: Any) -> DeclaredColumn:
    return DeclaredColumn(**{"name": "x", "per": "token", "dtype": "int32", **fields})


@pytest.mark.parametrize(
    ("field", "fields", "value"),
    [
        ("", {"name": "two words"}, "'two words'"),
        ("", {"name": "größe"}, "'größe'"),
        ("", {"name": "x" * 65}, "'x"),
        ("", {"name": 7}, "7"),
        ("per", {"per": "turn"}, "'turn'"),
        ("dtype", {"dtype": "uint16"}, "'uint16'"),
        ("dtype", {"dtype": "text"}, "'text'"),
        ("shape", {"shape": (2, 0)}, r"\(2, 0\)"),
        ("shape", {"shape": (1.5,)}, r"\(1.5,\)"),
        ("shape", {"shape": (1,) * 5}, r"\(1, 1"),
        ("shape", {"shape": 3}, "3"),
        ("fill", {"fill": 0.5}, "0.5"),
        ("fill", {"fill": 2**31}, "2147483648"),
        ("fill", {"fill": math.nan, "dtype": "float32"}, "nan"),
        ("fill", {"fill": 1e5, "dtype": "float16"}, "100000.0"),
        ("fill", {"fill": "0"}, "'0'"),
        ("is_optional", {"is_optional": 1}, "1"),
        ("is_constant", {"is_constant": True}, "True"),
        ("shape", {"per": "first_tokens"}, r"\(\)"),
        ("dtype", {"per": "first_tokens", "dtype": "int64", "shape": (1, 2)}, "'int64'"),
        ("dtype", {"per": "first_tokens", "dtype": "uint8", "shape": (1, 257)}, "'uint8'"),
        ("fill", {"per": "first_tokens", "shape": (1, 2), "fill": 1}, "1"),
    ],
)
def test_invalid_declaration_is_refused_by_field_and_value(
    field: str, fields: dict[str, Any], value: str
) -> None:
    name = rf"extra_columns\['x'\].{field}" if field else "extra_columns"

    with pytest.raises(InvalidConfigError, match=rf"^{name}: .*{value}"):
        column(**fields)


def test_declarations_are_sorted_and_go_together() -> None:
    constant = dataclasses.replace(STYLE, is_constant=True)

    assert make(extra_columns=[column(), ROUTES]).extra_columns == (ROUTES, column())
    assert make(extra_columns=(STYLE,), merge=False).extra_columns == (STYLE,)
    assert make(extra_columns=(constant,)).extra_columns == (constant,)
    with pytest.raises(InvalidConfigError, match=r"^extra_columns\['style'\].is_constant: .*merge"):
        make(extra_columns=(STYLE,))
    with pytest.raises(InvalidConfigError, match=r"^extra_columns: 'x' is declared twice"):
        make(extra_columns=(column(), column(dtype="float32")))


@pytest.mark.parametrize("given", [7, [7], [{"name": "x"}], [{"names": "x"}], "ab"])
def test_refuses_what_is_no_list_of_declarations(given: Any) -> None:
    with pytest.raises(InvalidConfigError, match=r"^extra_columns: .* is not a list of decl"):
        make(extra_columns=given)
