from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testkit import config, sealed, shape, turn
from testkit.planning import plan, ready
from turnstream.batching.config import BatchingConfig
from turnstream.batching.merge.plan import Manifest
from turnstream.batching.merge.storing import store_turns
from turnstream.batching.planning.report import MergeBreak, PlanReport, merge_report, plan_report
from turnstream.types import NO_PARENT, TrajectoryKey, Turn, TurnShape

KEY = TrajectoryKey("g0", 0)


def first_break(*turns: Turn) -> MergeBreak:
    return merge_report({KEY: store_turns(turns)}).breaks[0]


def test_counts_turns_rows_and_tokens() -> None:
    whole = store_turns([turn("ab", "CD"), turn("abcde", "F")])
    broken = store_turns([turn("ab", "CD"), turn("x", "Y")])

    report = merge_report({KEY: whole, TrajectoryKey("g0", 1): broken})

    assert (report.num_trajectories, report.num_turns, report.num_rows) == (2, 4, 3)
    assert (report.num_turn_tokens, report.num_row_tokens) == (16, 12)
    assert report.merge_ratio == 16 / 12
    assert [found.key.sample for found in report.breaks] == [1]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        # the first token that differs
        ([("ab", "CD"), ("abcde", "F"), ("abcxef", "G")], (2, 0, 3, "d", "x")),
        # one that an ancestor holds
        ([("ab", "CD"), ("abcde", "F"), ("abcdefgh", "I"), ("ax", "Y")], (3, 0, 1, "b", "x")),
        # a branch after the whole context
        ([("ab", "CD"), ("abcde", "F"), ("abcdx", "Y")], (2, 0, 4, None, "x")),
        # a shortened context
        ([("ab", "CD"), ("abc", "E")], (1, 0, 3, "d", None)),
    ],
)
def test_break_names_both_tokens_at_the_first_difference(
    turns: list[tuple[str, str]], expected: Any
) -> None:
    *place, kept, found = expected
    tokens = [None if letter is None else ord(letter) for letter in (kept, found)]

    assert first_break(*[turn(*each) for each in turns]) == MergeBreak(KEY, *place, *tokens)


def test_a_new_context_is_compared_with_the_turn_before() -> None:
    found = first_break(turn("ab", "CD"), turn("x", "Y"))

    assert store_turns([turn("ab", "CD"), turn("x", "Y")])[1].parent_turn == NO_PARENT
    assert found == MergeBreak(KEY, 1, 0, 0, ord("a"), ord("x"))


def test_nothing_has_a_merge_ratio_of_one() -> None:
    assert merge_report({}).merge_ratio == 1.0


# --------------------------------------------------------------------------------------
# what is odd about a batch


def plan_turns(*groups: list[list[TurnShape]], of: BatchingConfig | None = None) -> Manifest:
    """A batch of these groups; for each its members, for each of them its turns."""
    groups_of_members = [
        ready(
            str(number),
            *[
                sealed(str(number), sample=sample, reward=float(sample), turns=turns)
                for sample, turns in enumerate(members)
            ],
        )
        for number, members in enumerate(groups)
    ]
    return plan(*groups_of_members, of=of)


def test_a_batch_without_oddities_has_no_warning() -> None:
    found = plan_report(plan_turns([[shape()], [shape()]]), config())

    assert found == PlanReport(
        num_lone_groups=0,
        num_untrained_rows=0,
        num_empty_updates=0,
        num_rows_over_limit=0,
        longest_row=5,
    )
    assert found.warnings == {}


@pytest.mark.parametrize(("limit", "num_over"), [(0, 0), (6, 0), (5, 1), (4, 1), (3, 2)])
def test_case_9_rows_above_the_limit_are_counted_once_and_not_cut(
    limit: int, num_over: int
) -> None:
    # The reference warns once where the longest row exceeds `max_seq_len`, and cuts nothing.
    of = replace(config(), max_tokens_per_micro_batch=limit)
    manifest = plan_turns([[shape(2, 4)], [shape(2, 2)]], of=of)

    found = plan_report(manifest, of)

    assert (found.num_rows_over_limit, found.longest_row) == (num_over, 6)
    assert list(found.warnings) == ["num_rows_over_limit"] * bool(num_over)
    assert [cut.width for cut in manifest.mini_batches] == [6]


def test_case_28_rows_and_updates_without_a_trained_token_are_counted() -> None:
    masked = shape(2, 3, trained=0)
    of = config(2, 1)

    found = plan_report(plan_turns([[shape(), masked], [shape()]], [[masked], [masked]], of=of), of)

    assert (found.num_untrained_rows, found.num_empty_updates) == (3, 1)
    assert found.warnings == {
        "num_untrained_rows": "rows without a trained token: 3",
        "num_empty_updates": "updates without a trained token, which change nothing: 1",
    }


def test_rows_that_the_run_masks_are_no_oddity() -> None:
    of = replace(config(), mask_truncated=True, overlong_length=3)
    manifest = plan_turns([[shape(2, 4)], [shape(2, 2)], [shape(2, 2, trained=0)]], of=of)

    found = plan_report(manifest, of)

    assert manifest.groups[0].trajectories[0].is_masked
    assert found.num_untrained_rows == 1


@pytest.mark.parametrize(("limit", "num_over"), [(21, 0), (20, 1), (15, 1), (14, 2)])
def test_a_row_is_above_the_limit_by_what_it_costs(limit: int, num_over: int) -> None:
    # Half its length and half of that squared: a row of 6 tokens costs 21, one of 5 costs 15.
    costs: Any = {"cost_per_token": 0.5, "cost_per_squared_token": 0.5}
    of = replace(config(), max_tokens_per_micro_batch=limit, micro_batch_cost="quadratic", **costs)
    manifest = plan_turns([[shape(2, 4)], [shape(2, 3)]], of=of)

    assert plan_report(manifest, of).num_rows_over_limit == num_over


@pytest.mark.parametrize(
    ("changes", "num_lone"),
    [
        ({}, 1),
        ({"estimator": "rloo"}, 1),
        ({"estimator": "reinforce_pp_baseline"}, 1),
        ({"estimator": "reinforce_pp"}, 0),
        ({"singleton_advantage": "raw"}, 0),
    ],
)
def test_case_37_groups_of_one_are_counted_where_their_advantage_is_0(
    changes: dict[str, Any], num_lone: int
) -> None:
    of = replace(config(2), **changes)

    found = plan_report(plan_turns([[shape()]], [[shape()], [shape()]], of=of), of)

    assert found.num_lone_groups == num_lone
    assert list(found.warnings) == ["num_lone_groups"] * num_lone
