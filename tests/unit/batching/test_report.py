from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testkit import config, sealed, shape, turn
from testkit.planning import plan, ready
from turnstream.batching.config import BatchingConfig
from turnstream.batching.merge.merging import store_turns
from turnstream.batching.planning.report import (
    MergeBreak,
    merge_breaks,
    merge_counts,
    plan_warnings,
)
from turnstream.types import NO_PARENT, TrajectoryKey, Turn, TurnShape

KEY = TrajectoryKey("g0", 0)


def first_break(*turns: Turn) -> MergeBreak:
    return next(merge_breaks({KEY: store_turns(turns)}))


def test_counts_turns_rows_and_tokens() -> None:
    whole = store_turns([turn("ab", "CD"), turn("abcde", "F")])
    broken = store_turns([turn("ab", "CD"), turn("x", "Y")])

    payload = {KEY: whole, TrajectoryKey("g0", 1): broken}

    assert merge_counts(payload) == {
        "num_trajectories": 2,
        "num_turns": 4,
        "num_rows": 3,
        "num_turn_tokens": 16,
        "num_row_tokens": 12,
        "merge_ratio": 16 / 12,
    }
    assert [found.key.sample for found in merge_breaks(payload)] == [1]
    assert broken[1].parent_turn == NO_PARENT
    assert merge_counts({})["merge_ratio"] == 1.0


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        # the first token that differs
        ([("ab", "CD"), ("abcde", "F"), ("abcxef", "G")], (2, 0, 3)),
        # one that an ancestor holds
        ([("ab", "CD"), ("abcde", "F"), ("abcdefgh", "I"), ("ax", "Y")], (3, 0, 1)),
        # a branch after the whole context
        ([("ab", "CD"), ("abcde", "F"), ("abcdx", "Y")], (2, 0, 4)),
        # a new context is compared with the turn before
        ([("ab", "CD"), ("x", "Y")], (1, 0, 0)),
        # a shortened context
        ([("ab", "CD"), ("abc", "E")], (1, 0, 3)),
    ],
)
def test_break_names_the_first_difference(turns: list[tuple[str, str]], expected: Any) -> None:
    assert first_break(*[turn(*each) for each in turns]) == MergeBreak(KEY, *expected)


def warnings_of(
    *groups: list[list[TurnShape]], of: BatchingConfig | None = None, **facts: Any
) -> list[str]:
    """Return the warnings about a batch of these groups; for each its members with their turns."""
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
    manifest = plan(*groups_of_members, of=of)
    return [*plan_warnings(manifest, of or config(len(groups)), **facts).values()]


@pytest.mark.parametrize(
    ("announced", "num_unknown"), [((), 0), ((0, 7, 9), 0), ((0, 9), 2), ((0, 7), 1)]
)
def test_versions_that_were_never_announced_are_counted(
    announced: tuple[int, ...], num_unknown: int
) -> None:
    members = [sealed("0", sample=sample, reward=float(sample)) for sample in range(3)]
    members[0] = replace(members[0], oldest_version=7, newest_version=7)
    members[1] = replace(members[1], oldest_version=7, newest_version=9)

    found = plan_warnings(plan(ready("0", *members)), config(1), announced=announced)

    text = "trajectories of versions that were never announced, whose age is not known"
    assert [*found.values()] == [f"{text}: {num_unknown}"] * bool(num_unknown)


@pytest.mark.parametrize(
    ("costs", "limits"),
    [
        # The reference warns once where the longest row exceeds `max_seq_len`, and cuts nothing.
        ({}, {0: 0, 6: 0, 5: 1, 4: 1, 3: 2}),
        # Half its length and half of that squared: a row of 6 tokens costs 21, one of 4 costs 10.
        (
            {
                "micro_batch_cost": "quadratic",
                "cost_per_token": 0.5,
                "cost_per_squared_token": 0.5,
            },
            {21: 0, 20: 1, 10: 1, 9: 2},
        ),
    ],
)
def test_case_9_rows_that_cost_more_than_a_pass_are_counted(
    costs: dict[str, Any], limits: dict[int, int]
) -> None:
    for limit, num_over in limits.items():
        of = replace(config(), max_tokens_per_micro_batch=limit, **costs)

        found = warnings_of([[shape(2, 4)], [shape(2, 2)]], of=of)

        text = "rows above max_tokens_per_micro_batch, each in a pass of its own"
        assert found == [f"{text}: {num_over}"] * bool(num_over)


def test_case_28_rows_and_updates_without_a_trained_token_are_counted() -> None:
    masked = shape(2, 3, trained=0)
    masking = replace(config(), mask_truncated=True, overlong_length=3)

    of_a_run_that_masks = warnings_of([[shape(2, 4)], [shape(2, 2)], [masked]], of=masking)
    found = warnings_of([[shape(), masked], [shape()]], [[masked], [masked]], of=config(2, 1))

    assert found == [
        "rows without a trained token: 3",
        "updates without a trained token, which change nothing: 1",
    ]
    assert of_a_run_that_masks == ["rows without a trained token: 1"]


@pytest.mark.parametrize(
    ("changes", "num_lone"),
    [
        ({}, 1),
        ({"estimator": "rloo"}, 1),
        ({"estimator": "reinforce_pp_baseline"}, 1),
        ({"estimator": "reinforce_pp"}, 0),
        ({"estimator": "gae"}, 0),
        ({"singleton_advantage": "raw"}, 0),
    ],
)
def test_case_37_groups_of_one_are_counted_where_their_advantage_is_0(
    changes: dict[str, Any], num_lone: int
) -> None:
    found = warnings_of([[shape()]], [[shape()], [shape()]], of=replace(config(2), **changes))

    text = "groups of one trajectory, which get an advantage of 0: 1"
    assert found == [text] * num_lone
