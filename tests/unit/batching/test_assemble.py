from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import assert_same, spell, turn
from testkit.planning import planned_rows
from testkit.strategies import chains, trees
from turnstream.batching.merge.merging import merge_turns
from turnstream.batching.merge.plan import GroupPlan, TrajectoryPlan
from turnstream.batching.merge.storing import store_turns
from turnstream.batching.rows.assemble import assemble_rows
from turnstream.errors import CorruptRecordError
from turnstream.store.client.keys import trajectory_id
from turnstream.types import Status, StoredTurn, TrajectoryKey, Turn, VersionRun

Payload = Mapping[TrajectoryKey, Sequence[StoredTurn]]


def planned(
    key: TrajectoryKey, turns: Sequence[Turn], **changes: Any
) -> tuple[TrajectoryPlan, list[StoredTurn]]:
    """A trajectory of a plan, and the payload it names."""
    stored = [replace(own, payload_crc=10 + own.index) for own in store_turns(turns)]
    return planned_rows(key, stored, **changes), stored


def build(*episodes: Sequence[Turn], group_id: str = "g0") -> tuple[GroupPlan, Payload]:
    """A group of these episodes."""
    members: list[TrajectoryPlan] = []
    payload: dict[TrajectoryKey, Sequence[StoredTurn]] = {}
    for sample, turns in enumerate(episodes):
        plan, stored = planned(TrajectoryKey(group_id, sample), turns)
        members.append(plan)
        payload[plan.key] = stored
    return GroupPlan(group_id=group_id, prompt_uid="uid", trajectories=tuple(members)), payload


CHAIN = [turn("ab", "CD"), turn("abcdef", "G")]
BROKEN = [turn("ab", "C"), turn("xy", "ZU")]


def test_rows_come_in_the_order_of_the_plan() -> None:
    group, payload = build(CHAIN, BROKEN)

    assembled = assemble_rows([group], payload, first_row_id=7)

    assert spell(assembled) == ["abCDefG", "abC", "xyZU"]
    assert assembled.row_id.tolist() == [7, 8, 9]
    assert assembled.trajectory_id == ["g0/0/0", "g0/1/0", "g0/1/0"]
    assert assembled.sequence_index.tolist() == [0, 0, 1]
    assert assembled.is_last.tolist() == [True, False, True]
    assert assembled.prompt_length.tolist() == [2, 2, 2]


def test_case_18_rows_have_the_status_of_their_trajectory() -> None:
    # The reference writes the stop reason of the last turn of each row: "length" and "stop" here,
    # with flags False, True. A trajectory of ours ends once, by one reason.
    turns = [turn("ab", "CD"), turn("x", "Y"), turn("xyz", "U")]
    key = TrajectoryKey("g0", 0)
    plan, stored = planned(key, turns, status=Status.TRUNCATED)
    group = GroupPlan(group_id="g0", prompt_uid="uid", trajectories=(plan,))

    assembled = assemble_rows([group], {key: stored}, first_row_id=0)

    assert spell(assembled) == ["abCD", "xYzU"]
    assert assembled.is_last.tolist() == [False, True]
    assert assembled.status == ["truncated", "truncated"]


def test_rows_carry_what_the_plan_says_of_their_trajectory() -> None:
    key = TrajectoryKey("g/1", sample=3, attempt=2)
    plan, stored = planned(
        key, CHAIN, reward=0.25, advantage=-0.5, weights=(0.5,), status=Status.TRUNCATED
    )
    group = GroupPlan(group_id="g/1", prompt_uid="uid", trajectories=(plan,))

    assembled = assemble_rows([group], {key: stored}, first_row_id=0)

    assert (assembled.group_id, assembled.prompt_uid) == (["g/1"], ["uid"])
    assert (assembled.sample.tolist(), assembled.attempt.tolist()) == ([3], [2])
    assert assembled.status == ["truncated"]
    assert (assembled.reward[0], assembled.advantage[0], assembled.weight[0]) == (0.25, -0.5, 0.5)
    assert not assembled.is_padding[0]


def test_masked_trajectory_keeps_all_tokens_and_trains_none() -> None:
    masked, free = (TrajectoryKey("g", sample=sample) for sample in (0, 1))
    turns = [turn("ab", "CdE", logprobs=-0.5, rewards=1.0), turn("xy", "ZU", logprobs=-0.5)]
    whole, stored = planned(free, turns)
    plan = replace(
        whole,
        key=masked,
        is_masked=True,
        sequences=tuple(row._replace(num_trained_tokens=0) for row in whole.sequences),
    )
    group = GroupPlan(group_id="g", prompt_uid="", trajectories=(plan, whole))

    assembled = assemble_rows([group], {masked: stored, free: stored}, first_row_id=0)

    assert spell(assembled) == ["abcde", "xyzu", "abCdE", "xyZU"]
    assert assembled.logprobs is not None
    assert [own.tolist() for own in assembled.logprobs][:3] == [[0, 0, 0], [0, 0], [-0.5, 0, -0.5]]
    assert assembled.trajectory_num_tokens.tolist() == [0, 0, 4, 4]
    assert assembled.group_num_tokens.tolist() == [4, 4, 4, 4]
    assert [own.sum() for own in assembled.rewards] == [1.0, 0.0, 1.0, 0.0]


def test_tokens_of_masked_versions_are_not_trained() -> None:
    key = TrajectoryKey("g", sample=0)
    mixed = replace(turn("ab", "CdEF"), version_runs=(VersionRun(3, 2), VersionRun(4, 2)))
    plan, stored = planned(key, [mixed, turn("abcdefg", "HI", version=3), turn("xy", "Z")])
    trained = [2, 1]
    plan = replace(
        plan,
        sequences=tuple(
            row._replace(num_trained_tokens=count)
            for row, count in zip(plan.sequences, trained, strict=True)
        ),
    )
    group = GroupPlan(group_id="g", prompt_uid="", trajectories=(plan,))

    assembled = assemble_rows([group], {key: stored}, first_row_id=0, masked_versions=(2, 3))

    assert spell(assembled) == ["abcdEFghi", "xyZ"]
    with pytest.raises(CorruptRecordError, match="planned were"):
        assemble_rows([group], {key: stored}, first_row_id=0)


def test_a_masked_row_without_logprobs_beside_others_has_no_nan() -> None:
    masked, free = (TrajectoryKey("g", sample=sample) for sample in (0, 1))
    plan, stored = planned(masked, [turn("ab", "C")], is_masked=True)
    plan = replace(plan, sequences=(plan.sequences[0]._replace(num_trained_tokens=0),))
    other, more = planned(free, [turn("ab", "C", logprobs=-0.5)])
    group = GroupPlan(group_id="g", prompt_uid="", trajectories=(plan, other))

    assembled = assemble_rows([group], {masked: stored, free: more}, first_row_id=0)

    assert assembled.logprobs is not None
    assert assembled.logprobs.values.tolist() == [0.0, -0.5]


def test_the_id_of_a_trajectory_is_the_one_in_its_keys() -> None:
    key = TrajectoryKey("a b~/c", sample=3, attempt=2)

    assert key.trajectory_id == trajectory_id(key) == "a%20b%7E%2Fc/3/2"


def test_rows_know_the_trained_tokens_of_their_trajectory_and_group() -> None:
    group, payload = build(CHAIN, BROKEN)
    other, more = build([turn("a", "B")], [turn("a", "b")], group_id="g1")

    assembled = assemble_rows([group, other], {**payload, **more}, first_row_id=0)

    assert assembled.trajectory_num_tokens.tolist() == [3, 3, 3, 1, 0]
    assert assembled.group_num_tokens.tolist() == [6, 6, 6, 1, 1]


def test_case_22_payload_that_is_not_the_planned_one_is_refused() -> None:
    # The reference drops rows after the last flag silently.
    group, payload = build(CHAIN)
    (key,) = payload
    other = [replace(payload[key][0], payload_crc=99), *payload[key][1:]]
    more = [*payload[key], payload[key][1]]

    with pytest.raises(CorruptRecordError, match=r"2 turns with checksums \(99, 11\)"):
        assemble_rows([group], {key: other}, first_row_id=0)
    with pytest.raises(CorruptRecordError, match="3 turns with checksums"):
        assemble_rows([group], {key: more}, first_row_id=0)


@pytest.mark.parametrize("field", ["prompt_length", "num_tokens", "num_trained_tokens"])
def test_refuses_tokens_of_other_lengths_than_planned(field: str) -> None:
    group, payload = build([turn("ab", "CdE")])
    (member,) = group.trajectories
    (row,) = member.sequences
    other = row._replace(**{field: getattr(row, field) + 1})
    wrong = replace(member, sequences=(other,))

    with pytest.raises(CorruptRecordError, match=r"tokens \(2, 5, 2\), planned were"):
        assemble_rows([replace(group, trajectories=(wrong,))], payload, first_row_id=0)


@given(st.lists(trees() | chains(), min_size=1, max_size=4))
def test_stored_turns_assemble_to_the_merge_of_whole_turns(
    episodes: list[tuple[Turn, ...]],
) -> None:
    group, payload = build(*episodes)

    assembled = assemble_rows([group], payload, first_row_id=0)

    merged = [row for turns in episodes for row in merge_turns(turns)]
    runs = [
        [(-1 if version is None else version, count) for version, count in row.version_runs]
        for row in merged
    ]
    assert_same(list(assembled.input_ids), [row.input_ids for row in merged])
    assert_same(list(assembled.loss_mask), [row.loss_mask for row in merged])
    assert_same(list(assembled.rewards), [row.rewards for row in merged])
    assert [own.tolist() for own in assembled.run_versions] == [[v for v, _ in own] for own in runs]
    assert [own.tolist() for own in assembled.run_counts] == [[n for _, n in own] for own in runs]
    assert assembled.prompt_length.tolist() == [row.prompt_length for row in merged]
    has_logprobs = [own.logprobs is not None for turns in episodes for own in turns]
    assert (assembled.logprobs is not None) == any(has_logprobs)
    for found, row in zip(assembled.logprobs or [], merged, strict=False):
        missing = np.where(row.loss_mask, np.float32(np.nan), np.float32(0))
        np.testing.assert_array_equal(found, missing if row.logprobs is None else row.logprobs)
