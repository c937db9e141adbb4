from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import extra_column, rows
from testkit.shares import budgeted_passes, rank_share
from turnstream.batching.layouts.padded import left_padded
from turnstream.batching.packing.balance import balance
from turnstream.batching.packing.microbatch import Budget, CostModel
from turnstream.batching.rows.assemble import take_rows
from turnstream.batching.rows.minibatch import cut_ranks, rows_multiple
from turnstream.batching.rows.plain_rows import inert_row_id, inert_rows
from turnstream.errors import BatchingError
from turnstream.types import Ragged, Rows

CUT: dict[str, Any] = {"step": 1, "mini_batch": 0, "pad_token_id": 9}
FIVE = rows("abC", "abCDEF", "xY", "uvW", "kL")


def shares(batch: Rows, world: int, **options: Any) -> list[Rows]:
    return [
        rank_share(batch, dp_rank=r, dp_world_size=world, **CUT, **options) for r in range(world)
    ]


def test_case_31_rows_are_padded_to_equally_many_on_every_rank() -> None:
    # The reference makes eight rows of the same tokens with masks 1,0,0,0,0,0,0,0.
    eight, four = shares(rows("abC"), 8), shares(FIVE, 4)

    assert [part.loss_mask.values.tolist() for part in eight] == [[1], *[[0]] * 7]
    assert [part.input_ids.values.tolist() for part in eight[1:]] == [[9, 9]] * 7
    assert [part.is_padding.tolist() for part in eight] == [[False], *[[True]] * 7]
    assert [len(part) for part in four] == [2, 2, 2, 2]
    assert sum(int(part.is_padding.sum()) for part in four) == 3


def test_case_31_padding_of_a_mini_batch_is_no_row() -> None:
    # The reference pads with a copy of the mini-batch's row 0: [[row0],[row0 pad]] of the first.
    of_first = shares(rows("abC"), 2)
    of_second = shares(rows("abcD", "aB", first_row_id=1), 2)

    assert [part.row_id.tolist() for part in of_first] == [[0], [-4294967297]]
    assert [part.row_id.tolist() for part in of_second] == [[1], [2]]
    assert of_first[1].trajectory_id == ["inert-4294967297/0/0"]


def test_case_32_an_inert_row_is_empty_in_every_column() -> None:
    # The reference copies the other fields of row 0, with uids pad0 and pad1, and flags True.
    real = rows("aB")
    inert = inert_rows([-5, -6], pad_token_id=9, like=real)

    empty: dict[str, Any] = {
        "row_id": [-5, -6],
        "trajectory_id": ["inert-5/0/0", "inert-6/0/0"],
        "group_id": ["inert-5", "inert-6"],
        "prompt_uid": ["inert-5", "inert-6"],
        "status": ["", ""],
        **{name: [0, 0] for name in ("sample", "attempt", "sequence_index", "weight")},
        **{name: [0, 0] for name in ("advantage", "trajectory_num_tokens", "group_num_tokens")},
        "is_last": [False, False],
        "is_padding": [True, True],
        "reward": [None, None],
        "prompt_length": [1, 1],
        "input_ids": [[9, 9], [9, 9]],
        **{name: [[0], [0]] for name in ("loss_mask", "logprobs", "rewards")},
        "run_versions": [[-1], [-1]],
        "run_counts": [[1], [1]],
        **dict.fromkeys(("advantages", "token_weights", "operations"), None),
        "extras": {},
    }
    found = {name: getattr(inert, name) for name in Rows.__dataclass_fields__}
    assert {name: listed(column) for name, column in found.items()} == empty
    for name, column in found.items():
        for ours, theirs in zip(arrays(column), arrays(getattr(real, name)), strict=True):
            assert ours.dtype == theirs.dtype, name


def listed(column: Any) -> Any:
    """Return a column as lists, with None for NaN."""
    if isinstance(column, Ragged):
        return [row.tolist() for row in column]
    if isinstance(column, np.ndarray):
        return [None if value != value else value for value in column.tolist()]
    return column


def arrays(column: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(column, np.ndarray):
        return [column]
    return [column.values, column.offsets] if isinstance(column, Ragged) else []


def test_case_32_inert_row_has_only_dummy_routes() -> None:
    # As in the reference: experts 0 .. topk-1, and the router mask set on all of the row.
    routes = extra_column("first_tokens", np.full((2, 1, 2), 3, np.uint8), [0, 2])
    (_, padded) = shares(rows("abC", extras={"routes": routes}), 2)

    placed = left_padded(padded, width=3, response_width=1, pad_token_id=0).extras["routes"]

    assert placed.values.tolist() == [[[[0, 1]]] * 3]
    assert placed.is_missing is not None
    assert placed.is_missing.tolist() == [[True] * 3]
    assert placed.values.dtype == np.uint8


def test_case_32_inert_rows_have_zeros_in_optional_columns_of_the_others() -> None:
    # The reference copies the advantages of row 0.
    one = Ragged.from_rows([[7.0]], np.float32)
    (_, padded) = shares(replace(rows("abC"), advantages=one, token_weights=one), 2)
    (_, without) = shares(rows("abC", logprobs=None), 2)

    assert padded.advantages is not None
    assert padded.token_weights is not None
    assert padded.advantages.values.tolist() == padded.token_weights.values.tolist() == [0]
    assert (without.logprobs, without.advantages, without.token_weights) == (None, None, None)


def test_only_rank_gets_the_same_object_or_one_inert_row() -> None:
    # As in the reference, which notes a pad_size of 0.
    assert rank_share(FIVE, dp_rank=0, dp_world_size=1, **CUT) is FIVE
    empty = take_rows(FIVE, [])
    for num_ranks in (1, 3):
        assert [part.is_padding.tolist() for part in shares(empty, num_ranks)] == [
            [True]
        ] * num_ranks


def test_ids_of_inert_rows_differ_in_all_that_names_them() -> None:
    ids = [inert_row_id(*name) for name in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]]

    assert len(set(ids)) == 4
    assert max(ids) < 0
    for name in ((2**31, 0, 0), (0, 2**12, 0), (0, 0, 2**20), (0, 0, -1)):
        with pytest.raises(BatchingError, match="no id is left"):
            inert_row_id(*name)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 7))
def test_every_row_is_on_one_rank_of_equally_many_rows(lengths: list[int], world: int) -> None:
    ranks = cut_ranks(np.array(lengths, np.int32), dp_world_size=world)

    num_padded = sum(map(len, ranks))
    assert {len(rank) for rank in ranks} == {num_padded // world}
    assert sorted(row for rank in ranks for row in rank) == list(range(num_padded))
    assert max(len(lengths), 1) <= num_padded < max(len(lengths), 1) + world


def test_ranks_are_cut_by_cost_and_method_of_the_run() -> None:
    lengths = [100, 60, 59, 41, 10, 10, 10]
    squares = Budget(limit=0, model="quadratic", a=0.0, b=1.0)
    for budget, costs in [
        (Budget(limit=0), [*lengths, 2]),  # the last one is an inert row
        (squares, [length**2 for length in (*lengths, 2)]),
        (replace(squares, balancing="longest_first"), [length**2 for length in (*lengths, 2)]),
        (Budget(limit=0, balancing="none"), lengths),
    ]:
        found = cut_ranks(np.array(lengths), dp_world_size=2, budget=budget)

        parts = balance([*costs, 2][:8], num_parts=2, method=budget.balancing, equal_count=True)
        assert found == sorted(map(sorted, parts))


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from(get_args(CostModel)),
    st.integers(0, 40),
)
def test_no_rank_is_short_of_rows_for_its_passes(
    lengths: list[int], world: int, passes_of: int, rows_of: int, model: CostModel, limit: int
) -> None:
    batch = rows(*["x|" + "A" * length for length in lengths])
    multiple = rows_multiple(
        dp_world_size=world, passes_multiple_of=passes_of, mini_batch_rows=rows_of
    )

    made = [
        budgeted_passes(
            batch,
            dp_rank=rank,
            dp_world_size=world,
            budget=Budget(limit=limit, model=model),
            passes_multiple_of=passes_of,
            multiple_of=multiple,
        )
        for rank in range(world)
    ]

    [num_passes] = {len(passes) for passes in made}
    [num_rows] = {sum(map(len, passes)) for passes in made}
    assert num_passes % passes_of == 0
    assert num_rows * world % rows_of == 0
    assert num_rows * world < len(batch) + multiple


def test_case_32_rows_for_no_rank_or_multiple_are_refused() -> None:
    assert rows_multiple(dp_world_size=8) == 8
    for sizes in ({"mini_batch_rows": 0}, {"passes_multiple_of": 0}):
        with pytest.raises(BatchingError, match="each must be at least 1"):
            rows_multiple(dp_world_size=8, **sizes)
    wrong: list[dict[str, Any]] = [{"dp_world_size": 0}, {"dp_world_size": 1, "multiple_of": 0}]
    for ranks in wrong:
        with pytest.raises(BatchingError, match=r"=0 .*must be at least 1"):
            cut_ranks(np.array([2]), **ranks)
