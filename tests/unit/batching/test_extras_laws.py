"""Extra columns through the merge, held against loops over lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from testkit import assert_same, mini_batch_info
from testkit.planning import assembled_rows
from testkit.shares import join_shares, rank_share
from testkit.strategies import chains, declared_columns, trees, with_extras
from turnstream.batching.merge.merging import merge_turns
from turnstream.batching.merge.storing import store_turns
from turnstream.records.batches import decode_mini_batch, encode_mini_batch
from turnstream.types import (
    NO_PARENT,
    DeclaredColumn,
    MiniBatch,
    Rows,
    Turn,
)


def column_of(rows: Any, name: str) -> list[Any]:
    return [row.extras[name].tolist() for row in rows]


@st.composite
def episodes(draw: st.DrawFn) -> tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...]]:
    declared = draw(declared_columns())
    turns = draw(chains() | trees())
    return draw(with_extras(turns, declared)), declared


def linked_slowly(
    turns: Sequence[Turn], declared: Sequence[DeclaredColumn]
) -> list[tuple[int, int]]:
    """(parent, shared tokens) of every turn, by comparing lists.

    A turn goes on in the longest row that its prompt begins with, of equal ones the newest, unless
    it brings other items. Else it hangs on the longest beginning that an earlier turn holds.
    """
    whole = [[*t.prompt_ids.tolist(), *t.response_ids.tolist()] for t in turns]
    links: list[tuple[int, int]] = []
    for index, one in enumerate(turns):
        prompt = one.prompt_ids.tolist()
        shared = [
            max(n for n in range(len(prompt) + 1) if prompt[:n] == earlier[:n])
            for earlier in whole[:index]
        ]
        most = max(shared, default=0)
        holders = [turn for turn in range(index) if most and shared[turn] == most]
        ending = [turn for turn in holders if len(whole[turn]) == most]
        continued = {
            parent for parent, count in links if parent >= 0 and count == len(whole[parent])
        }
        open_rows = [
            (shared[turn], turn)
            for turn in range(index)
            if shared[turn] == len(whole[turn]) and turn not in continued
        ]
        tried = [(turn, count) for count, turn in sorted(open_rows, reverse=True)]
        tried += [(turn, most) for turn in [*ending, *holders][:1]]
        same = [
            link
            for link in tried
            if has_items_of(one, turns[link[0]], declared) or link[1] < len(whole[link[0]])
        ]
        links.append([*same, (NO_PARENT, 0)][0])
    return links


def has_items_of(one: Turn, before: Turn, declared: Sequence[DeclaredColumn]) -> bool:
    names = [
        column.name for column in declared if column.per == "items" and column.name in one.extras
    ]
    kept = [(before.extras[name].tolist(), one.extras[name].tolist()) for name in names]
    return all(given[: len(known)] == known for known, given in kept)


def said_slowly(
    column: DeclaredColumn, turns: Sequence[Turn], links: Sequence[tuple[int, int]]
) -> list[list[Any]]:
    """Return the column of every turn for its whole prompt and response, as lists."""
    said: list[list[Any]] = []
    fill = np.full(column.shape, column.fill, column.dtype).tolist()
    for one, (parent, shared) in zip(turns, links, strict=True):
        given = one.extras[column.name].tolist() if column.name in one.extras else None
        before = said[parent][:shared] if parent != NO_PARENT else []
        match column.per:
            case "token":
                count = len(one.prompt_ids) + len(one.response_ids)
                own = given or [fill] * count
                said.append([*before, *own[len(before) :]])
            case "first_tokens":
                said.append([*before, *(given or [])[len(before) :]])
            case "response_token":
                said.append(given or [fill] * len(one.response_ids))
            case "row":
                first = said[0] if said and column.is_constant else [fill]
                said.append(given or first)
            case "items":
                said.append(given or [])
    return said


def merged_slowly(
    column: DeclaredColumn, turns: Sequence[Turn], rows: Sequence[Any], said: list[list[Any]]
) -> list[list[Any]]:
    fill = np.full(column.shape, column.fill, column.dtype).tolist()
    merged: list[list[Any]] = []
    for row in rows:
        if column.per != "response_token":
            merged.append(said[row.turns[-1]])
            continue
        values: list[Any] = []
        for index in row.turns:
            start = len(turns[index].prompt_ids) - row.prompt_length
            values += [fill] * (start - len(values)) + said[index]
        merged.append(values)
    return merged


def items_given(turns: Sequence[Turn], declared: Sequence[DeclaredColumn]) -> tuple[Turn, ...]:
    """No items said to be no items, which leaves no question of whose they are."""
    none = {c.name: np.zeros((0, *c.shape), c.dtype) for c in declared if c.per == "items"}
    return tuple(replace(one, extras={**none, **one.extras}) for one in turns)


def assembled(turns: Sequence[Turn], declared: Sequence[DeclaredColumn]) -> Rows:
    return assembled_rows(store_turns(turns, extra_columns=declared), declared)


@given(episode=episodes())
def test_rows_have_what_loops_over_lists_find(
    episode: tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...]],
) -> None:
    turns, declared = items_given(*episode), episode[1]

    merged = merge_turns(turns, extra_columns=declared)
    rows = assembled(turns, declared)

    links = linked_slowly(turns, declared)
    stored = store_turns(turns, extra_columns=declared)
    assert [(one.parent_turn, one.shared_tokens) for one in stored] == links
    assert list(rows.extras) == [column.name for column in declared]
    for column in declared:
        said = said_slowly(column, turns, links)
        expected = merged_slowly(column, turns, merged, said)
        found = rows.extras[column.name]
        assert column_of(merged, column.name) == expected
        assert [values.tolist() for values in found.values] == expected
        if column.per != "first_tokens":
            assert found.dtype == column.numpy_dtype


@given(episode=episodes(), world=st.integers(1, 3))
def test_shares_keep_every_column_and_inert_rows_are_legal(
    episode: tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...]], world: int
) -> None:
    declared = episode[1]
    rows = assembled(items_given(*episode), declared)

    shares = [
        rank_share(rows, step=1, mini_batch=0, dp_rank=r, dp_world_size=world, pad_token_id=0)
        for r in range(world)
    ]
    joined = join_shares(shares)

    assert_same(joined.extras, rows.extras)
    counts = {"token": 2, "response_token": 1, "row": 1}
    for share in shares:
        for column in declared:
            of_inert = share.extras[column.name].values.lengths[share.is_padding]
            assert set(of_inert.tolist()) <= {counts.get(column.per, 0)}
        encoded = encode_mini_batch(MiniBatch(rows=share, info=mini_batch_info(share)))
        decoded = decode_mini_batch(encoded.data, expected_hash=encoded.content_hash)
        assert_same(dict(decoded.rows.extras), share.extras)
