"""Advantages that differ from turn to turn, from the seals of a group to the tensors of a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnstream.batching.assemble import assemble_rows, concatenate_rows, take_rows
from turnstream.batching.config import Aggregation, BatchingConfig, RowWeights
from turnstream.batching.denominators import row_scales
from turnstream.batching.jagged import jagged
from turnstream.batching.judging import problem_of, teaches_nothing
from turnstream.batching.layout import left_padded
from turnstream.batching.merge import store_turns
from turnstream.batching.microbatch import Budget
from turnstream.batching.minibatch import budgeted_passes, rank_share
from turnstream.batching.packed import packed
from turnstream.batching.plan import Manifest
from turnstream.batching.planning import plan_batch
from turnstream.batching.readiness import ReadyGroup
from turnstream.batching.right_padded import right_padded
from turnstream.testing import config, sealed, shape, turn
from turnstream.testing.strategies import chains, trees
from turnstream.types import (
    Rows,
    SealedTrajectory,
    Status,
    StoredTurn,
    TrajectoryKey,
    Turn,
)

GIGPO = replace(config(), estimator="gigpo", turn_discount=0.5, divide_by_std=False)
Payload = dict[TrajectoryKey, list[StoredTurn]]


def group_of(
    *episodes: Sequence[Turn],
    rewards: Sequence[float],
    statuses: Sequence[Status] = (),
    group_id: str = "a",
) -> tuple[ReadyGroup, Payload]:
    """A complete group of these turns, and what is stored of it."""
    members: list[SealedTrajectory] = []
    payload: Payload = {}
    for sample, (turns, reward) in enumerate(zip(episodes, rewards, strict=True)):
        stored = [replace(own, payload_crc=own.index) for own in store_turns(turns)]
        member = sealed(
            group_id,
            sample=sample,
            reward=reward,
            turns=[own.shape for own in stored],
            turn_rewards=[0.0 if t.rewards is None else float(t.rewards.sum()) for t in turns],
            payload_crcs=[own.payload_crc for own in stored],
            anchors=[own.anchor for own in stored],
            status=statuses[sample] if statuses else Status.COMPLETED,
        )
        members.append(member)
        payload[member.key] = stored
    ready = ReadyGroup(group_id=group_id, prompt_uid="", members=tuple(members), completed_by="1-0")
    return ready, payload


def plan(*groups: ReadyGroup, of: BatchingConfig, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {"run": "run", "step": 1, "lineage": "main", "previous_hash": ""}
    return plan_batch(groups, config=of, **fields, first_row_id=0, config_revision=1, **changes)


def branching_group(**fields: Any) -> tuple[ReadyGroup, Payload]:
    """Of sample 0 the first turn is gone on from twice; sample 1 has a new context in its second.

    Rows: ab CD x E | abcdy F, then ab G | zz HI.
    """
    first = turn("ab", "CD", anchor="s")
    return group_of(
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


def test_both_parts_are_divided_by_their_deviations_where_the_run_says_so() -> None:
    ready, _ = branching_group()

    manifest = plan(ready, of=replace(GIGPO, divide_by_std=True))

    a = 0.707106
    first, second = manifest.groups[0].trajectories
    assert first.advantage == pytest.approx(a, abs=2e-6)
    assert first.turn_advantages == pytest.approx((a + a, a + a, a), abs=2e-5)
    assert second.turn_advantages == pytest.approx((-a - a, -a - a), abs=2e-5)
    assert {float(np.float32(v)) for v in first.turn_advantages} == {*first.turn_advantages}


def test_the_only_trajectory_of_a_group_gets_what_the_run_says_and_compares_its_own_turns() -> None:
    turns = [turn("ab", "C", anchor="s"), turn("abc", "D", anchor="s")]
    ready, _ = group_of(turns, rewards=[4.0])

    zero = plan(ready, of=GIGPO).groups[0].trajectories[0]
    raw = plan(ready, of=replace(GIGPO, singleton_advantage="raw")).groups[0].trajectories[0]

    assert (zero.advantage, zero.turn_advantages) == (0.0, (-1.0, 1.0))
    assert (raw.advantage, raw.turn_advantages) == (4.0, (3.0, 5.0))


def test_states_of_other_groups_are_not_compared() -> None:
    one, _ = group_of([turn("ab", "C", anchor="s")], rewards=[1.0])
    other, _ = group_of([turn("ab", "C", anchor="s")], rewards=[0.0], group_id="b")

    manifest = plan(one, other, of=replace(GIGPO, batch_groups=2, mini_batch_groups=2))

    assert [g.trajectories[0].turn_advantages for g in manifest.groups] == [(0.0,), (0.0,)]


def test_a_member_whose_reward_is_left_out_is_in_no_comparison() -> None:
    leaving_out = replace(GIGPO, mask_truncated=True, masked_reward="leave_out")
    episodes = [[turn("ab", "C", anchor="s")] for _ in range(3)]
    cut = [Status.COMPLETED, Status.TRUNCATED, Status.COMPLETED]
    ready, payload = group_of(*episodes, rewards=[1.0, 50.0, 0.0], statuses=cut)

    manifest = plan(ready, of=leaving_out)
    rows = assemble_rows(manifest.groups, payload, first_row_id=0)

    members = manifest.groups[0].trajectories
    assert [m.turn_advantages for m in members] == [(1.0,), (0.0,), (-1.0,)]
    assert rows.advantages is not None
    assert [own.tolist() for own in rows.advantages] == [[1.0], [0.0], [-1.0]]


def test_tokens_that_the_plan_masks_have_none() -> None:
    old = turn("ab", "C", anchor="s", version=3)
    new = turn("abc", "D", anchor="t", version=4)
    ready, payload = group_of([old, new], [new], rewards=[1.0, 0.0])
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
# what is refused, and what is filtered


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "has no anchor at turn 0, which estimator='gigpo' needs"),
        ({"anchors": [1, None]}, "has no anchor at turn 1, which estimator='gigpo' needs"),
        ({"anchors": [0, 0]}, ""),
    ],
)
def test_a_member_without_an_anchor_is_left_out_by_name(fields: Any, says: str) -> None:
    member = sealed(turns=[shape(), shape()], **fields)

    assert problem_of(member, GIGPO) == says
    assert problem_of(member, config()) == ""


def test_a_turn_whose_reward_leaves_float32_is_no_member_though_the_sum_does_not() -> None:
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


# --------------------------------------------------------------------------------------
# against loops

SETTINGS: list[tuple[RowWeights, Aggregation]] = [
    ("per_row", "token_mean"),
    ("per_row", "prompt_mean"),
    ("per_row", "rollout_mean"),
    ("per_row", "seq_mean_token_sum"),
    ("per_trajectory", "seq_mean_token_mean"),
    ("rollout_mean", "seq_mean_token_mean"),
]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def compared(values: Sequence[float], *, divides: bool) -> list[float]:
    deviations = [value - mean(values) for value in values]
    if not divides:
        return deviations
    variance = sum(d * d for d in deviations) / (len(values) - 1)
    return [d / (variance**0.5 + 1e-6) for d in deviations]


def advantages_slowly(
    members: Sequence[SealedTrajectory], of: BatchingConfig
) -> dict[tuple[int, int], float]:
    """Of every (sample, turn), out of loops over turns that may have begun in the same state."""
    returns: dict[tuple[int, int], float] = {}
    states: dict[int | None, list[tuple[int, int]]] = {}
    rewards: list[float] = []
    for member in members:
        earned = [*member.turn_rewards]
        if of.reward_source == "outcome":
            earned = [0.0] * (len(earned) - 1) + [member.reward or 0.0]
        rewards.append(sum(earned))
        for index, state in enumerate(member.anchors):
            place = member.key.sample, index
            ahead = enumerate(earned[index:])
            returns[place] = sum(of.turn_discount**k * reward for k, reward in ahead)
            states.setdefault(state, []).append(place)
    wholes = [0.0] * len(members)
    if len(members) > 1:
        wholes = compared(rewards, divides=of.divide_by_std)
    found = {place: wholes[place[0]] for place in returns}
    for places in states.values():
        if len(places) > 1:
            values = compared([returns[p] for p in places], divides=of.divide_by_std)
            for place, value in zip(places, values, strict=True):
                found[place] += of.turn_weight * value
    return found


@st.composite
def anchored_groups(draw: st.DrawFn) -> list[list[Turn]]:
    """Episodes of chains and trees of which some turns began in one of three states."""
    episodes = draw(st.lists(chains() | trees(), min_size=1, max_size=4))
    start = np.array([9], np.int32)  # the first token of a row is scored by none
    return [
        [
            replace(
                own,
                prompt_ids=np.concatenate((start, own.prompt_ids)),
                anchor=draw(st.sampled_from(["s", b"t", 3])),
            )
            for own in turns
        ]
        for turns in episodes
    ]


@st.composite
def configs_of_gigpo(draw: st.DrawFn) -> BatchingConfig:
    row_weights, aggregation = draw(st.sampled_from(SETTINGS))
    return BatchingConfig(
        batch_groups=1,
        mini_batch_groups=1,
        estimator="gigpo",
        reward_source=draw(st.sampled_from(["outcome", "sum_of_turns"])),
        turn_weight=draw(st.sampled_from([0.0, 0.5, 1.0])),
        turn_discount=draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])),
        divide_by_std=draw(st.booleans()),
        merge=draw(st.booleans()),
        row_weights=row_weights,
        aggregation=aggregation,
    )


def laid_out(share: Rows) -> list[list[float]]:
    """By layout, the advantages of all trained tokens, row by row."""
    width = int(share.input_ids.lengths.max())
    left = left_padded(
        share, width=width, response_width=int(share.loss_mask.lengths.max()), pad_token_id=0
    )
    right = right_padded(share, width=width, pad_token_id=0)
    (one,) = packed(share, bins=[range(len(share))], pad_token_id=0)
    flat = jagged(share)
    return [
        left.advantages_BR[left.loss_mask_BR].tolist(),
        right.advantages_BT[right.loss_mask_BT].tolist(),
        one.advantages_N[one.loss_mask_N].tolist(),
        flat.advantages_M[flat.loss_mask_M].tolist(),
    ]


@settings(max_examples=30)
@given(anchored_groups(), configs_of_gigpo(), st.data())
def test_every_layout_rank_and_pass_has_what_loops_over_turns_give(
    episodes: list[list[Turn]], of: BatchingConfig, data: st.DataObject
) -> None:
    numbers = st.lists(st.integers(-4, 4), min_size=len(episodes), max_size=len(episodes)).map(
        lambda drawn: [float(each) for each in drawn]
    )
    small = [
        [
            replace(own, rewards=None if own.rewards is None else own.rewards.clip(-4, 4).round())
            for own in turns
        ]
        for turns in episodes
    ]
    ready, payload = group_of(*small, rewards=data.draw(numbers))
    dp_world_size = data.draw(st.integers(1, 3))
    expected = advantages_slowly(ready.members, of)

    manifest = plan(ready, of=of)
    members = [*payload]
    halves = [
        assemble_rows(
            [replace(group, trajectories=part) for group in manifest.groups],
            payload,
            first_row_id=first_row_id,
        )
        for part, first_row_id in _halves(manifest)
    ]
    whole = concatenate_rows(halves)

    by_row = _rows_slowly(manifest, dict(zip(members, small, strict=True)), expected)
    denominators = manifest.mini_batches[0].denominators
    scales = row_scales(whole, denominators=denominators, aggregation=of.aggregation)
    losses = [
        scale * sum(value * (7 * row + t + 1) for t, value in enumerate(values))
        for row, (scale, values) in enumerate(zip(scales, by_row, strict=True))
    ]
    total = 0.0
    for dp_rank in range(dp_world_size):
        cut: dict[str, Any] = {"dp_rank": dp_rank, "dp_world_size": dp_world_size}
        share = rank_share(whole, **cut, step=1, mini_batch=0, pad_token_id=0)
        assert share.advantages is not None
        for positions in budgeted_passes(whole, **cut, budget=Budget(limit=8, model="padded")):
            part = take_rows(share, positions)
            rows = part.row_id.tolist()
            masks = [mask.astype(bool).tolist() for mask in part.loss_mask]
            told = [by_row[row] if row >= 0 else [0.0] for row in rows]
            trained = [
                value
                for mask, values in zip(masks, told, strict=True)
                for is_trained, value in zip(mask, values, strict=True)
                if is_trained
            ]
            for found in laid_out(part):
                assert found == pytest.approx(trained, rel=1e-5, abs=2e-5)
            scales = row_scales(part, denominators=denominators, aggregation=of.aggregation)
            assert part.advantages is not None
            for row, scale, values in zip(rows, scales, part.advantages, strict=True):
                weights = 7 * row + np.arange(len(values)) + 1
                total += float(scale) * float(np.dot(values.astype(np.float64), weights))
    assert total == pytest.approx(sum(losses), rel=1e-4, abs=1e-3)


def _halves(manifest: Manifest) -> list[tuple[tuple[Any, ...], int]]:
    """The trajectories as two assemblers would take them, and the first row id of each part."""
    own = manifest.groups[0].trajectories
    cut = len(own) // 2
    num_rows = sum(len(each.sequences) for each in own[:cut])
    return [(part, first) for part, first in ((own[:cut], 0), (own[cut:], num_rows)) if part]


def _rows_slowly(
    manifest: Manifest,
    episodes: dict[TrajectoryKey, list[Turn]],
    expected: dict[tuple[int, int], float],
) -> list[list[float]]:
    """Of every row the advantage of each response token, by the places of the whole prompts."""
    rows: list[list[float]] = []
    for planned in manifest.groups[0].trajectories:
        turns = episodes[planned.key]
        for row in planned.sequences:
            values = [0.0] * (row.num_tokens - row.prompt_length)
            for index in row.turns:
                own = turns[index]
                begin = len(own.prompt_ids) - row.prompt_length
                for t in range(len(own.response_ids)):
                    if own.loss_mask is None or own.loss_mask[t]:
                        values[begin + t] = expected[planned.key.sample, index]
            rows.append(values)
    return rows
