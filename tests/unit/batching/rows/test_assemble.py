from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import assert_same, mini_batch_info, operation_rows, rows, spell, turn
from testkit.planning import planned_rows, rows_of
from testkit.shares import join_shares, rank_share
from testkit.strategies import chains, mini_batches, operation_mini_batches, trees
from turnstream.batching.merge.merging import merge_turns, store_turns
from turnstream.batching.merge.plan import GroupPlan
from turnstream.batching.rows.assemble import (
    concatenate_rows,
    joined_column,
    take_rows,
)
from turnstream.batching.rows.minibatch import cut_ranks
from turnstream.errors import BatchingError, CorruptRecordError
from turnstream.records.batches import decode_mini_batch, encode_mini_batch
from turnstream.types import (
    Extent,
    ExtraColumn,
    MiniBatch,
    Ragged,
    Rows,
    Status,
    StoredTurn,
    TrajectoryKey,
    Turn,
    VersionRun,
)

Payload = Mapping[TrajectoryKey, Sequence[StoredTurn]]


def build(
    *episodes: Sequence[Turn], group_id: str = "g0", **changes: Any
) -> tuple[GroupPlan, Payload]:
    """Return a group of these episodes, and the payload that its plan names."""
    payload = {
        TrajectoryKey(group_id, sample): [
            replace(own, payload_crc=10 + own.index) for own in store_turns(turns)
        ]
        for sample, turns in enumerate(episodes)
    }
    members = [planned_rows(key, stored, **changes) for key, stored in payload.items()]
    return GroupPlan(group_id=group_id, prompt_uid="uid", trajectories=tuple(members)), payload


def train(group: GroupPlan, sample: int, *counts: int, **changes: Any) -> GroupPlan:
    """Return the group with so many trained tokens in the rows of one member."""
    members = [*group.trajectories]
    pairs = zip(members[sample].sequences, counts, strict=True)
    rows = tuple(row._replace(num_trained_tokens=count) for row, count in pairs)
    members[sample] = replace(members[sample], sequences=rows, **changes)
    return replace(group, trajectories=tuple(members))


CHAIN = [turn("ab", "CD"), turn("abcdef", "G")]
BROKEN = [turn("ab", "C"), turn("xy", "ZU")]


def test_rows_come_in_the_order_of_the_plan() -> None:
    group, payload = build(CHAIN, BROKEN)

    assembled = rows_of([group], payload, first_row_id=7)

    assert spell(assembled) == ["abCDefG", "abC", "xyZU"]
    assert assembled.row_id.tolist() == [7, 8, 9]
    assert assembled.trajectory_id == ["g0/0/0", "g0/1/0", "g0/1/0"]
    assert assembled.sequence_index.tolist() == [0, 0, 1]
    assert assembled.is_last.tolist() == [True, False, True]
    assert assembled.prompt_length.tolist() == [2, 2, 2]
    other, more = build([turn("a", "B")], [turn("a", "b")], group_id="g1")
    both = rows_of([group, other], {**payload, **more})
    assert both.trajectory_num_tokens.tolist() == [3, 3, 3, 1, 0]
    assert both.group_num_tokens.tolist() == [6, 6, 6, 1, 1]


def test_case_18_rows_have_the_values_of_their_trajectory() -> None:
    # The reference writes the stop reason of the last turn of each row: "length" and "stop" here,
    # with flags False, True. A trajectory of ours ends once, by one reason.
    turns = [turn("ab", "CD"), turn("x", "Y"), turn("xyz", "U")]
    group, payload = build(
        *(turns, turns),
        group_id="g/1",
        status=Status.TRUNCATED,
        reward=0.25,
        advantage=-0.5,
        weights=(0.5, 0.5),
    )

    assembled = take_rows(rows_of([group], payload), [2, 3])

    assert spell(assembled) == ["abCD", "xYzU"]
    assert assembled.is_last.tolist() == [False, True]
    assert (assembled.group_id, assembled.prompt_uid) == (["g/1"] * 2, ["uid"] * 2)
    assert (assembled.sample.tolist(), assembled.attempt.tolist()) == ([1, 1], [0, 0])
    assert assembled.status == ["truncated"] * 2
    assert (assembled.reward[0], assembled.advantage[0], assembled.weight[0]) == (0.25, -0.5, 0.5)
    assert not assembled.is_padding.any()


def test_masked_trajectory_keeps_all_tokens_and_trains_none() -> None:
    first = turn("ab", "CdE", logprobs=-0.5, rewards=1.0, weights=[0.5, 0, 2])
    turns = [first, turn("xy", "ZU", logprobs=-0.5)]
    group, payload = build(turns, turns, [turn("ab", "C")])  # the last has no log-probability
    group = train(train(group, 0, 0, 0, is_masked=True), 2, 0, is_masked=True)

    assembled = rows_of([group], payload)

    assert spell(assembled) == ["abcde", "xyzu", "abCdE", "xyZU", "abc"]
    assert assembled.logprobs is not None
    assert [own.tolist() for own in assembled.logprobs] == [
        *([0, 0, 0], [0, 0]),
        *([-0.5, 0, -0.5], [-0.5, -0.5]),
        [0],
    ]
    assert assembled.token_weights is not None
    assert [own.tolist() for own in assembled.token_weights] == [
        *([0, 0, 0], [0, 0]),
        *([0.5, 0, 2], [1, 1]),
        [0],
    ]
    assert assembled.trajectory_num_tokens.tolist() == [0, 0, 4, 4, 0]
    assert assembled.group_num_tokens.tolist() == [4] * 5
    assert [own.sum() for own in assembled.rewards] == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_tokens_of_masked_versions_are_not_trained() -> None:
    mixed = replace(turn("ab", "CdEF"), version_runs=(VersionRun(3, 2), VersionRun(4, 2)))
    group, payload = build([mixed, turn("abcdefg", "HI", version=3), turn("xy", "Z")])
    group = train(group, 0, 2, 1)

    assembled = rows_of([group], payload, masked_versions=(2, 3))

    assert spell(assembled) == ["abcdEFghi", "xyZ"]
    with pytest.raises(CorruptRecordError, match="planned were"):
        rows_of([group], payload)


def test_case_22_payload_that_is_not_the_planned_one_is_refused() -> None:
    # The reference drops rows after the last flag silently.
    group, payload = build(CHAIN)
    (key,) = payload
    other = [replace(payload[key][0], payload_crc=99), *payload[key][1:]]
    more = [*payload[key], payload[key][1]]

    with pytest.raises(CorruptRecordError, match=r"2 turns with checksums \(99, 11\)"):
        rows_of([group], {key: other})
    with pytest.raises(CorruptRecordError, match="3 turns with checksums"):
        rows_of([group], {key: more})


@pytest.mark.parametrize("field", ["prompt_length", "num_tokens", "num_trained_tokens"])
def test_tokens_of_other_lengths_than_planned_are_refused(field: str) -> None:
    group, payload = build([turn("ab", "CdE")])
    (member,) = group.trajectories
    (row,) = member.sequences
    wrong = replace(member, sequences=(row._replace(**{field: getattr(row, field) + 1}),))

    with pytest.raises(CorruptRecordError, match=r"tokens \(2, 5, 2\), planned were"):
        rows_of([replace(group, trajectories=(wrong,))], payload)


@given(st.lists(trees() | chains(), min_size=1, max_size=4))
def test_stored_turns_assemble_to_the_merge_of_whole_turns(
    episodes: list[tuple[Turn, ...]],
) -> None:
    group, payload = build(*episodes)

    assembled = rows_of([group], payload)

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


def with_extra(
    built: Rows, *, per: Extent = "items", shape: tuple[int, ...] = (2,), dtype: Any = np.int16
) -> Rows:
    values = [np.full((row + 1, *shape), row, dtype) for row in range(len(built))]
    return replace(
        built, extras={"x": ExtraColumn(per=per, values=Ragged.from_rows(values, dtype))}
    )


@given(mini=mini_batches() | operation_mini_batches(), data=st.data())
def test_taken_rows_have_their_own_values(mini: MiniBatch, data: st.DataObject):
    order = data.draw(st.permutations(range(len(mini.rows))))

    taken = take_rows(mini.rows, order)

    assert taken.row_id.tolist() == mini.rows.row_id[order].tolist()
    for place, position in enumerate(order):
        assert_same(take_rows(taken, [place]), take_rows(mini.rows, [position]))
    assert_same(take_rows(taken, np.argsort(order).tolist()), mini.rows)


@given(mini=mini_batches() | operation_mini_batches())
def test_shares_of_all_ranks_join_to_the_mini_batch(mini: MiniBatch):
    numbers = np.arange(len(mini.rows), dtype=np.int64)
    real = replace(mini.rows, row_id=np.where(mini.rows.is_padding, -1 - numbers, numbers))
    real = take_rows(real, np.flatnonzero(~real.is_padding).tolist())

    shares = [
        rank_share(real, step=1, mini_batch=0, dp_rank=r, dp_world_size=3, pad_token_id=9)
        for r in range(3)
    ]
    decoded = [
        decode_mini_batch(
            encode_mini_batch(MiniBatch(rows=share, info=mini_batch_info(share))).data
        )
        for share in shares
    ]

    cut = cut_ranks(real.input_ids.lengths, dp_world_size=3)
    own = [share.row_id[~share.is_padding].tolist() for share in shares]
    assert own == [real.row_id[[at for at in of if at < len(real)]].tolist() for of in cut]
    assert_same([mini.rows for mini in decoded], shares)
    assert_same(join_shares(shares), real)


def test_inert_rows_of_operations_have_targets_without_weight_and_extras_without_values():
    batch = with_extra(operation_rows("ABC", num_targets=2))

    share = rank_share(batch, step=1, mini_batch=0, dp_rank=1, dp_world_size=2, pad_token_id=9)

    assert share.is_padding.tolist() == [True]
    assert share.operations
    assert share.operations.request_id == [""]
    assert share.operations.target_ids[0].tolist() == [[0, 0], [0, 0]]
    assert share.operations.target_weights[0].tolist() == [[0, 0], [0, 0]]
    assert share.extras["x"].values[0].shape == (0, 2)
    assert share.extras["x"].dtype == np.int16


@pytest.mark.parametrize(
    ("reason", "parts"),
    [
        ("operations to concatenate: OperationColumns and None", [operation_rows("AB"), rows("C")]),
        (
            r"extras .*: the columns \['x'\] and the columns \[\]",
            [with_extra(rows("aB")), rows("C")],
        ),
        (
            r"target_ids .*: int64\[\] and int64\[2\]",
            [operation_rows("AB"), operation_rows("C", num_targets=2, first_row_id=2)],
        ),
        ("per .*: 'items' and 'row'", [with_extra(rows("aB")), with_extra(rows("aB"), per="row")]),
        (
            r"values .*: int32\[2\] and int16\[3\]",
            [with_extra(rows("aB"), dtype=np.int32), with_extra(rows("aB"), shape=(3,))],
        ),
    ],
)
def test_parts_whose_columns_do_not_go_together_are_refused(reason: str, parts: list[Rows]):
    with pytest.raises(BatchingError, match=reason):
        concatenate_rows(parts)


def test_more_tokens_than_int32_offsets_count_are_refused():
    column = Ragged(np.zeros(0, np.int32), np.array([0, 2**30], np.int32))  # not read before

    with pytest.raises(BatchingError, match="2147483648 values in one mini-batch"):
        joined_column([column, column])


def test_slices_of_larger_columns_are_joined_without_what_stands_around_them():
    whole = Ragged.from_rows([[1], [2, 3], [4]], np.int32)
    part = Ragged(whole.values, whole.offsets[1:3])

    joined = joined_column([part, part])

    assert [row.tolist() for row in joined] == [[2, 3], [2, 3]]
    assert joined.offsets.tolist() == [0, 2, 4]
