"""Extra columns through the merge: one kind at a time, and held against loops over lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import assert_same, spell, turn
from testkit.columns import IMAGES, POSITIONS, ROUTES, STYLE, TEACHER, images, routes, with_columns
from testkit.links import linked_slowly
from testkit.planning import assembled_rows
from testkit.strategies import chains, declared_columns, trees, with_extras
from turnstream.batching.config.declarations import no_values
from turnstream.batching.merge.merged_extras import whole_extras
from turnstream.batching.merge.merging import ExtraIndex, merge_turns, narrowed, store_turns
from turnstream.batching.merge.prefix import PrefixMatch
from turnstream.errors import BatchingError, InvalidTurnError
from turnstream.types import NO_PARENT, DeclaredColumn, ExtraPiece, Rows, Turn

DIFFERING = replace(STYLE, is_constant=False)


def column_of(rows: Any, name: str) -> list[Any]:
    return [row.extras[name].tolist() for row in rows]


@pytest.mark.parametrize(
    ("texts", "expected", "kept"),
    [
        (["ab|C", "abcd|E", "abx|Y", "qr|S"], ["abCdE", "abxY", "qrS"], [True, True, False]),
        (["ab|C", "abcde|F", "abcdx|Y"], ["abCdeF", "abcdxY"], [True, True]),
    ],
    ids=["shared tokens", "a prompt that diverges in a turn without new items"],
)
def test_turn_without_items_keeps_those_of_its_shared_tokens(
    texts: list[str], expected: list[str], kept: list[bool]
) -> None:
    first, *others = [turn(*text.split("|")) for text in texts]

    rows = merge_turns([with_columns(first, images=images(1)), *others], extra_columns=[IMAGES])

    assert spell(rows) == expected
    assert column_of(rows, "images") == [images(1).tolist() if own else [] for own in kept]


def test_turn_stored_without_items_has_none_and_inherits_none() -> None:
    index = ExtraIndex([IMAGES, replace(TEACHER, is_optional=True)])
    first = with_columns(turn("ab", "C"), images=images(1))
    index.add(first, index.link(first, [PrefixMatch(NO_PARENT, 0)]))

    second = index.as_stored(turn("abcd", "E"))

    assert_same(second.extras, {"images": no_values(IMAGES)})
    assert "images" not in index.link(second, [PrefixMatch(0, 3)]).pieces
    assert index.as_stored(first).extras["images"].tolist() == images(1).tolist()


def test_prompt_that_diverges_in_a_turn_with_items_must_name_its_own() -> None:
    first = with_columns(turn("ab", "C"), images=images(1))

    with pytest.raises(InvalidTurnError, match=r"^extras\['images'\]: is missing: .* turn 0"):
        store_turns([first, turn("ax", "Y")], extra_columns=[IMAGES])

    none = with_columns(turn("ax", "Y"), images=images())
    assert store_turns([first, none], extra_columns=[IMAGES])[1].extras == {}


def test_cut_values_are_restored_in_the_declared_type() -> None:
    positions = np.arange(15, dtype=np.int32).reshape(5, 3)
    declared = [IMAGES, POSITIONS, ROUTES]
    turns = [
        with_columns(
            turn("ab", "C"), images=images(1), positions=positions[:3], routes=routes(1, 2)
        ),
        with_columns(
            turn("abcd", "E"), images=images(1, 2), positions=positions, routes=routes(1, 2, 3, 4)
        ),
    ]

    stored = store_turns(turns, extra_columns=declared)
    whole = whole_extras(stored, declared)

    assert [own["routes"].dtype for own in whole] == [np.int16, np.int16]
    for found, own in zip(whole, turns, strict=True):
        assert_same(found, dict(own.extras))
    with pytest.raises(InvalidTurnError, match="1 values of turn 0, which has 0"):
        whole_extras([replace(stored[0], extras={}), stored[1]], [IMAGES])


def test_case_21_differing_value_per_row_is_refused_with_column_and_turns() -> None:
    # This a merge cannot carry. The reference refuses the columns that it knows, and no other.
    turns = [
        with_columns(turn("ab", "C"), style=np.array([1], np.int8)),
        with_columns(turn("abcd", "E"), style=np.array([2], np.int8)),
    ]

    with pytest.raises(InvalidTurnError, match=r"'style'\]: differs between turns 0 and 1"):
        merge_turns(turns, extra_columns=[DIFFERING])
    with pytest.raises(InvalidTurnError, match=r"^extras\['style'\]: 2 is not that of turn 0"):
        store_turns(turns, extra_columns=[STYLE])


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (POSITIONS, np.zeros((2, 3), np.int32), "2 values for 2 prompt and 1 response tokens"),
        (POSITIONS, np.zeros((3, 2), np.int32), r"int32\[3, 2\] is not int32\[n, 3\]"),
        (POSITIONS, np.zeros((3, 3), np.int64), r"int64\[3, 3\] is not int32\[n, 3\]"),
        (ROUTES, routes(), "0 values for 1 to 3 first tokens"),
        (ROUTES, routes(1, 2, 3, 4), "4 values for 1 to 3 first tokens"),
        (TEACHER, np.zeros(2, np.float32), "2 values for 1 response tokens"),
        (STYLE, np.zeros(2, np.int8), "2 values for the turn, which has one"),
        (TEACHER, None, "is missing, and not declared optional"),
    ],
)
def test_a_turn_whose_columns_are_not_as_declared_is_refused(
    column: DeclaredColumn, values: Any, message: str
) -> None:
    extras = {} if values is None else {column.name: values}

    with pytest.raises(InvalidTurnError, match=rf"^extras\['{column.name}'\]: .*{message}"):
        merge_turns([with_columns(turn("ab", "C"), **extras)], extra_columns=[column])


@pytest.mark.parametrize("declared", [(), (TEACHER,)])
def test_case_21_undeclared_column_is_refused(declared: Any) -> None:
    # The reference refuses to merge beside routes and images, and drops whatever else a row has.
    undeclared = with_columns(turn("ab", "C"), routes=routes(1))

    for work in (merge_turns, store_turns):
        with pytest.raises(InvalidTurnError, match=r"^extras\['routes'\]: the run declares"):
            work([undeclared], extra_columns=declared)


def test_linking_alone_remembers_nothing() -> None:
    index = ExtraIndex([STYLE])
    one = with_columns(turn("ab", "C"), style=np.array([1], np.int8))
    other = with_columns(turn("ab", "C"), style=np.array([2], np.int8))

    index.link(one, [PrefixMatch(NO_PARENT, 0)])
    linked = index.link(other, [PrefixMatch(NO_PARENT, 0)])

    assert linked.pieces["style"].values.tolist() == [2]


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [
        (255, np.uint8),
        (256, np.int16),
        (32_767, np.int16),
        (32_768, np.int32),
        (2**31 - 1, np.int32),
    ],
)
def test_case_11_the_type_is_the_narrowest_that_holds_every_choice(
    largest: int, dtype: Any
) -> None:
    # As in the reference.
    choices = narrowed(np.array([[[3, largest]]], np.int64))

    assert (choices.tolist(), choices.dtype) == ([[[3, largest]]], dtype)


@pytest.mark.parametrize(
    ("expert", "message"), [(2**31, "expert 2147483648 is above 2147483647"), (-1, "expert -1 is")]
)
def test_case_11_expert_that_no_type_holds_is_refused(expert: int, message: str) -> None:
    # Only the largest was compared: -1 was stored as expert 255.
    with pytest.raises(InvalidTurnError, match=f"^routes: {message}"):
        narrowed(np.array([[[0, expert]]], np.int64))
    if expert < 0:
        one = with_columns(turn("ab", "C"), routes=routes(1, expert))
        with pytest.raises(InvalidTurnError, match=rf"^extras\['routes'\]: {message}"):
            store_turns([one], extra_columns=[ROUTES])


@st.composite
def episodes(draw: st.DrawFn) -> tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...]]:
    declared = draw(declared_columns())
    turns = draw(chains() | trees())
    return draw(with_extras(turns, declared)), declared


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
        # A turn that omits an optional column has none of it; others have all of their values.
        whole = [own.get(column.name) for own in whole_extras(stored, declared)]
        assert [None if own is None else own.tolist() for own in whole] == [
            None if own is None and column.is_optional else said[number]
            for number, own in enumerate(whole)
        ]
        assert all(
            own is not None
            for own, one in zip(whole, stored, strict=True)
            if column.name in one.extras
        )


@pytest.mark.parametrize(
    ("column", "piece", "message"),
    [
        (POSITIONS, ExtraPiece(0, np.zeros((3, 3), np.int64)), "int64"),
        (TEACHER, None, "turn 0 has none"),
        (ROUTES, ExtraPiece(0, routes(1).astype(np.int64)), "int64"),
        (IMAGES, ExtraPiece(3, images(1)), "turn 0 follows turn -1"),
    ],
)
def test_a_stored_column_that_cannot_be_is_refused(
    column: DeclaredColumn, piece: ExtraPiece | None, message: str
) -> None:
    (stored,) = store_turns([turn("ab", "C")])
    wrong = replace(stored, extras={} if piece is None else {column.name: piece})

    with pytest.raises(InvalidTurnError, match=message):
        assembled_rows([wrong], [column])


def test_more_values_than_int32_offsets_can_count_are_refused() -> None:
    # The array needs no memory: every value is the same one.
    stored = store_turns([turn("ab", "C"), turn("x", "Y"), turn("q", "R")])
    many = ExtraPiece(0, np.broadcast_to(np.zeros((1, 2), np.float32), (2**30, 2)))
    wrong = [replace(one, extras={"images": many}) for one in stored]

    with pytest.raises(BatchingError, match="3221225472 values in one mini-batch: offsets are"):
        assembled_rows(wrong, [IMAGES])


def test_a_turn_without_a_token_needs_no_value_per_token() -> None:
    nothing = with_columns(turn("", ""), positions=np.zeros((0, 3), np.int32))

    rows = assembled([nothing], [POSITIONS])

    assert rows.extras["positions"].values.lengths.tolist() == [0]


def test_values_that_the_parent_does_not_hold_are_refused() -> None:
    first, second = store_turns(
        [with_columns(turn("ab", "C"), images=images(1)), turn("abcd", "E")], extra_columns=[IMAGES]
    )
    wrong = replace(second, extras={"images": ExtraPiece(2, images())})

    with pytest.raises(InvalidTurnError, match="2 values of turn 0, which has 1"):
        assembled_rows([first, wrong], [IMAGES])


def test_a_stored_column_that_the_run_does_not_declare_is_passed_over() -> None:
    (stored,) = store_turns(
        [with_columns(turn("ab", "C"), images=images(1))], extra_columns=[IMAGES]
    )

    assert assembled_rows([stored], []).extras == {}


def test_case_11_choices_are_stored_and_merged_in_the_narrowest_type() -> None:
    # As in the reference, experts 3 and 300 in one batch are int16.
    small, large = turn("ab", "C"), turn("xy", "Z")
    turns = [
        with_columns(small, routes=routes(1, 2)),
        with_columns(large, routes=routes(300)),
    ]

    stored = store_turns(turns, extra_columns=[ROUTES])

    assert [t.extras["routes"].values.dtype for t in stored] == [np.uint8, np.int16]
    assert assembled(turns, [ROUTES]).extras["routes"].dtype == np.int16
    assert assembled(turns[:1], [ROUTES]).extras["routes"].dtype == np.uint8
