"""Advantages that differ from turn to turn, from the seals of a group to the tensors of a loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testkit import config, sealed, shape, turn
from testkit.planning import Payload, plan, stored_group
from turnstream.batching.fold.decisions import ReadyGroup
from turnstream.batching.fold.eligibility import problem_of, teaches_nothing
from turnstream.batching.rows.assemble import assemble_rows
from turnstream.types import (
    Status,
)

GIGPO = replace(config(), estimator="gigpo", turn_discount=0.5, divide_by_std=False)


def branching_group(**fields: Any) -> tuple[ReadyGroup, Payload]:
    """Sample 0 continues its first turn twice; sample 1 has a new context in its second.

    Rows: ab CD x E | abcdy F, then ab G | zz HI.
    """
    first = turn("ab", "CD", anchor="s")
    return stored_group(
        [first, turn("abcdx", "E", anchor="t"), turn("abcdy", "F", anchor="u")],
        [turn("ab", "G", anchor="s"), turn("zz", "HI", anchor="t")],
        rewards=[1.0, 0.0],
        **fields,
    )


def test_every_turn_gets_its_own_in_whatever_row_it_is_trained() -> None:
    # Returns .25, .5, 1 against 0, 0: in "s" +-.125, in "t" +-.25, and "u" is seen once.
    ready, payload = branching_group()

    manifest = plan(ready, of=replace(GIGPO, turn_weight=2.0))
    rows = assemble_rows(manifest.groups, payload, first_row_id=0)

    first, second = manifest.groups[0].trajectories
    assert (first.advantage, first.turn_advantages) == (0.5, (0.75, 1.0, 0.5))
    assert (second.advantage, second.turn_advantages) == (-0.5, (-0.75, -1.0))
    assert rows.advantage.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert rows.advantages is not None
    assert [own.tolist() for own in rows.advantages] == [
        [0.75, 0.75, 0.0, 1.0],
        [0.5],
        [-0.75],
        [-1.0, -1.0],
    ]


def test_only_trajectory_of_a_group_compares_its_own_turns() -> None:
    turns = [turn("ab", "C", anchor="s"), turn("abc", "D", anchor="s")]
    ready, _ = stored_group(turns, rewards=[4.0])

    zero = plan(ready, of=GIGPO).groups[0].trajectories[0]
    raw = plan(ready, of=replace(GIGPO, singleton_advantage="raw")).groups[0].trajectories[0]

    assert (zero.advantage, zero.turn_advantages) == (0.0, (-1.0, 1.0))
    assert (raw.advantage, raw.turn_advantages) == (4.0, (3.0, 5.0))


def test_a_member_whose_reward_is_left_out_is_in_no_comparison() -> None:
    leaving_out = replace(GIGPO, mask_truncated=True, masked_reward="leave_out")
    one = turn("ab", "C", anchor="s")
    episodes = [[one], [one, turn("xy", "D", anchor="s")], [one]]
    cut = [Status.COMPLETED, Status.TRUNCATED, Status.COMPLETED]
    ready, payload = stored_group(*episodes, rewards=[1.0, 50.0, 0.0], statuses=cut)

    manifest = plan(ready, of=leaving_out)
    rows = assemble_rows(manifest.groups, payload, first_row_id=0)

    members = manifest.groups[0].trajectories
    assert [m.turn_advantages for m in members] == [(1.0,), (0.0, 0.0), (-1.0,)]
    assert rows.advantages is not None
    assert [own.tolist() for own in rows.advantages] == [[1.0], [0.0], [0.0], [-1.0]]


def test_tokens_that_the_plan_masks_have_none() -> None:
    old = turn("ab", "C", anchor="s", version=3)
    new = turn("abc", "D", anchor="t", version=4)
    ready, payload = stored_group([old, new], [new], rewards=[1.0, 0.0])
    versions = (((3, 1),), ((4, 1),))
    member = sealed(
        "a",
        turns=ready.members[0].turns,
        payload_crcs=ready.members[0].payload_crcs,
        anchors=ready.members[0].anchors,
        turn_versions=versions,
    )
    ready = replace(ready, members=(member, ready.members[1]))

    manifest = plan(ready, of=GIGPO, masked_versions=(3,))
    rows = assemble_rows(manifest.groups, payload, first_row_id=0, masked_versions=(3,))

    assert rows.advantages is not None
    assert [own.tolist() for own in rows.advantages] == [[0.0, 1.0], [-1.0]]


def test_other_estimators_have_none_per_turn() -> None:
    ready, payload = branching_group()

    manifest = plan(ready, of=config())
    rows = assemble_rows(manifest.groups, payload, first_row_id=0)

    assert {t.turn_advantages for t in manifest.groups[0].trajectories} == {()}
    assert rows.advantages is None


# --------------------------------------------------------------------------------------
# refused members, and filtered groups


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "has no anchor at turn 0, which estimator='gigpo' needs"),
        ({"anchors": [1, None]}, "has no anchor at turn 1, which estimator='gigpo' needs"),
        ({"anchors": [0, 0]}, ""),
    ],
)
def test_member_without_an_anchor_is_excluded_with_its_name(fields: Any, says: str) -> None:
    member = sealed(turns=[shape(), shape()], **fields)

    assert problem_of(member, GIGPO) == says
    assert problem_of(member, config()) == ""


def test_turn_with_a_reward_beyond_float32_is_no_member() -> None:
    rewards = [3e38, -3e38, 1.0]
    member = sealed(turns=[shape()] * 3, turn_rewards=rewards, anchors=[1, 2, 3], reward=None)
    by_turns = replace(GIGPO, reward_source="sum_of_turns")

    assert problem_of(member, by_turns) == "has a reward of 3e+38 at turn 0"
    assert problem_of(member, replace(config(), reward_source="sum_of_turns")) == ""


@pytest.mark.parametrize(
    ("changes", "is_filtered"),
    [
        ({}, False),  # the same reward, a turn later: 0.25 against 0.5 from "s"
        ({"turn_discount": 1.0}, True),
        ({"turn_weight": 0.0}, True),
        ({"estimator": "grpo", "turn_discount": 1.0, "divide_by_std": True}, True),
    ],
)
def test_equal_rewards_teach_where_turns_of_one_state_differ(
    changes: Any, is_filtered: bool
) -> None:
    long = sealed(turns=[shape()] * 3, anchors=[1, 2, 3])
    short = sealed(sample=1, turns=[shape()] * 2, anchors=[1, 4])

    assert teaches_nothing([long, short], replace(GIGPO, **changes)) == is_filtered
