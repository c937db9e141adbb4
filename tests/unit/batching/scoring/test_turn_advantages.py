"""Advantages that differ from turn to turn, from the seals of a group to the tensors of a loss."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import ZERO_VARIANCE, config, sealed, shape, turn
from testkit.planning import plan, rows_of, stored_group
from testkit.shares import budgeted_passes, rank_share
from testkit.strategies import chains, trees
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import ReadyGroup
from turnstream.batching.fold.members import problem_of
from turnstream.batching.layouts.jagged import jagged
from turnstream.batching.layouts.packed import packed
from turnstream.batching.layouts.padded import left_padded, right_padded
from turnstream.batching.merge.merging import anchor_hash, store_turns
from turnstream.batching.merge.plan import Manifest
from turnstream.batching.packing.microbatch import Budget
from turnstream.batching.rows.assemble import take_rows
from turnstream.batching.scoring.group_filters import filter_reason
from turnstream.errors import InvalidTurnError
from turnstream.types import Rows, SealedTrajectory, Status, Turn, VersionRun

GIGPO = replace(config(), estimator="gigpo", turn_discount=0.5, divide_by_std=False)
NEEDED = "which estimator='gigpo' needs"


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
    rows = rows_of(manifest.groups, payload)

    members = manifest.groups[0].trajectories
    assert [m.turn_advantages for m in members] == [(1.0,), (0.0, 0.0), (-1.0,)]
    assert rows.advantages is not None
    assert [own.tolist() for own in rows.advantages] == [[1.0], [0.0], [0.0], [-1.0]]


def test_tokens_that_the_plan_masks_have_none_and_are_in_no_mean() -> None:
    old = turn("ab", "C", anchor="s", version=3)
    new = turn("abc", "D", anchor="t", version=4)
    ready, payload = stored_group([old, new], [new], rewards=[1.0, 0.0])
    mixed = replace(
        ready.members[0], turn_versions=((VersionRun(3, 1),), (VersionRun(4, 1),)), oldest_version=3
    )
    ready = replace(ready, members=(mixed, ready.members[1]))
    normalised = replace(GIGPO, normalize_advantages="batch")

    manifest = plan(ready, of=GIGPO, masked_versions=(3,))
    rows = rows_of(manifest.groups, payload, masked_versions=(3,))
    masked = plan(ready, of=normalised, masked_versions=(3,)).groups[0].trajectories
    whole = plan(ready, of=normalised).groups[0].trajectories

    assert rows.advantages is not None
    assert [own.tolist() for own in rows.advantages] == [[0.0, 1.0], [-1.0]]
    # Without masked tokens the turns have 0.5, 1.0 and -1.0.
    assert [t.turn_advantages[-1] for t in masked] == pytest.approx([1.0, -1.0])
    assert [t.turn_advantages[-1] for t in whole] == pytest.approx([0.980581, -1.372813])


def test_other_estimators_have_none_per_turn() -> None:
    ready, payload = stored_group([turn("ab", "CD", anchor="s")], rewards=[1.0])

    manifest = plan(ready)

    assert {t.turn_advantages for t in manifest.groups[0].trajectories} == {()}
    assert rows_of(manifest.groups, payload).advantages is None


@pytest.mark.parametrize(
    ("fields", "source", "says"),
    [
        ({}, "outcome", "has no anchor at turn 0, which estimator='gigpo' needs"),
        (
            {"anchors": [1, None]},
            "outcome",
            "has no anchor at turn 1, which estimator='gigpo' needs",
        ),
        ({"anchors": [0, 0]}, "outcome", ""),
        (
            {"turn_rewards": [3e38, -3e38], "anchors": [1, 2], "reward": None},
            "sum_of_turns",
            "has a reward of 3e+38 at turn 0",
        ),
    ],
)
def test_member_without_an_anchor_or_float32_reward_is_excluded_with_its_turn(
    fields: Any, source: Any, says: str
) -> None:
    member = sealed(turns=[shape(), shape()], **fields)

    assert problem_of(member, replace(GIGPO, reward_source=source)) == says
    assert problem_of(member, replace(config(), reward_source=source)) == ""


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
    of = replace(GIGPO, group_filters=ZERO_VARIANCE, **changes)
    long = sealed(turns=[shape()] * 3, anchors=[1, 2, 3])
    short = sealed(sample=1, turns=[shape()] * 2, anchors=[1, 4])

    assert bool(filter_reason([long, short], of)) == is_filtered


SMALL = st.integers(-4, 4).map(float)


def compared(values: Sequence[float], *, divides: bool) -> list[float]:
    deviations = [value - statistics.mean(values) for value in values]
    if not divides:
        return deviations
    variance = sum(d * d for d in deviations) / (len(values) - 1)
    return [d / (variance**0.5 + 1e-6) for d in deviations]


def advantages_slowly(
    members: Sequence[SealedTrajectory], of: BatchingConfig
) -> dict[tuple[int, int], float]:
    """Return the advantage of every (sample, turn), by loops over turns with the same state."""
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
    """Episodes of chains and trees of which every turn began in one of three states."""
    episodes = draw(st.lists(chains() | trees(), min_size=1, max_size=4))
    start = np.array([9], np.int32)  # the first token of a row is scored by none
    return [
        [
            replace(
                own,
                prompt_ids=np.concatenate((start, own.prompt_ids)),
                rewards=np.array([draw(SMALL) for _ in own.response_ids], np.float32),
                anchor=draw(st.sampled_from(["s", b"t", 3])),
            )
            for own in turns
        ]
        for turns in episodes
    ]


@st.composite
def configs_of_gigpo(draw: st.DrawFn) -> BatchingConfig:
    return replace(
        GIGPO,
        reward_source=draw(st.sampled_from(["outcome", "sum_of_turns"])),
        turn_weight=draw(st.sampled_from([0.0, 0.5, 1.0])),
        turn_discount=draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])),
        divide_by_std=draw(st.booleans()),
        merge=draw(st.booleans()),
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


def rows_slowly(
    manifest: Manifest, episodes: Sequence[Sequence[Turn]], of: BatchingConfig, ready: ReadyGroup
) -> list[list[float]]:
    """Return the advantage of each response token by row, by the places of the whole prompts."""
    expected = advantages_slowly(ready.members, of)
    rows: list[list[float]] = []
    for planned, turns in zip(manifest.groups[0].trajectories, episodes, strict=True):
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


@given(anchored_groups(), configs_of_gigpo())
def test_normalised_turns_are_whitened_over_the_trained_tokens_of_all_rows(
    episodes: list[list[Turn]], of: BatchingConfig
) -> None:
    ready, payload = stored_group(*episodes, rewards=[float(n % 3) for n in range(len(episodes))])

    raw, found = [
        rows_of(plan(ready, of=own).groups, payload)
        for own in (of, replace(of, normalize_advantages="batch"))
    ]

    assert raw.advantages is not None
    assert found.advantages is not None
    is_trained = raw.loss_mask.values.astype(np.bool_)
    tokens = raw.advantages.values[is_trained].astype(np.float64)
    expected = (tokens - tokens.mean()) / np.sqrt(tokens.var() + 1e-8) if len(tokens) else tokens
    assert found.advantages.values[is_trained].tolist() == pytest.approx(
        expected.tolist(), abs=2e-3
    )


@given(anchored_groups(), configs_of_gigpo(), st.integers(1, 3), st.data())
def test_every_layout_rank_and_pass_has_what_loops_over_turns_give(
    episodes: list[list[Turn]], of: BatchingConfig, dp_world_size: int, data: st.DataObject
) -> None:
    ready, payload = stored_group(*episodes, rewards=[data.draw(SMALL) for _ in episodes])
    cut: dict[str, Any] = {"dp_world_size": dp_world_size}

    manifest = plan(ready, of=of)
    whole = rows_of(manifest.groups, payload)

    by_row = rows_slowly(manifest, episodes, of, ready)
    for dp_rank in range(dp_world_size):
        share = rank_share(whole, dp_rank=dp_rank, **cut, step=1, mini_batch=0, pad_token_id=0)
        budget = Budget(limit=8, model="padded")
        for positions in budgeted_passes(whole, dp_rank=dp_rank, **cut, budget=budget):
            part = take_rows(share, positions)
            expected = [by_row[row] if row >= 0 else [0.0] for row in part.row_id.tolist()]
            trained = np.concatenate(expected)[part.loss_mask.values.astype(np.bool_)].tolist()
            for found in laid_out(part):
                assert found == pytest.approx(trained, rel=1e-5, abs=2e-5)


@pytest.mark.parametrize(
    ("anchor", "kept"),
    [
        # As `printf 'room 3' | sha256sum | cut -c -16` says, and of nothing at all.
        ("room 3", 0xCE7E7C3D821BD771),
        (b"room 3", 0xCE7E7C3D821BD771),
        ("Zürich", 0x4251685E06CAB635),
        ("", 0xE3B0C44298FC1C14),
        (0, 0),
        (2**64 - 1, 2**64 - 1),
        (np.uint64(2**63), 2**63),
        (None, None),
    ],
)
def test_an_anchor_is_the_same_64_bits_in_any_language(anchor: Any, kept: int | None) -> None:
    assert anchor_hash(anchor) == kept
    assert anchor_hash(anchor_hash(anchor)) == kept
    assert [own.anchor for own in store_turns([turn("a", "B", anchor=anchor)])] == [kept]


@pytest.mark.parametrize(
    ("anchor", "says"),
    [
        (-1, "-1 is not a whole number from 0 to 1844674"),
        (2**64, "18446744073709551616 is not a whole number from 0 to 1844674"),
        (True, "True is not a whole number from 0 to 1844674"),
        (1.0, "1.0 is not a text, bytes or a whole number"),
        (["a"], r"\['a'\] is not a text, bytes or a whole number"),
        ("\ud800", r"'\\ud800' is no valid Unicode"),
    ],
)
def test_invalid_anchor_is_refused_with_its_value(anchor: Any, says: str) -> None:
    with pytest.raises(InvalidTurnError, match=f"^anchor: {says}"):
        anchor_hash(anchor)
