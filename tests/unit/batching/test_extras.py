"""Extra columns through the merge, held against loops over lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.assemble import assemble_rows, concatenate_rows, take_rows
from turnstream.batching.extras import ExtraIndex
from turnstream.batching.merge import (
    merge_trajectories,
    merge_turns,
    plan_sequences,
    split_sequences,
    store_turns,
)
from turnstream.batching.minibatch import inert_rows, join_shares, rank_share
from turnstream.batching.plan import GroupPlan
from turnstream.batching.prefix import PrefixMatch
from turnstream.errors import BatchingError, InvalidTurnError, UnmergeableColumnError
from turnstream.records.batches import decode_mini_batch, encode_mini_batch
from turnstream.testing import (
    assert_same,
    mini_batch_info,
    spell,
    trajectory_plan,
    turn,
)
from turnstream.testing.strategies import chains, declared_columns, trees, with_extras
from turnstream.types import (
    NO_PARENT,
    DeclaredColumn,
    ExtraPiece,
    MiniBatch,
    Rows,
    StoredTurn,
    TrajectoryKey,
    Turn,
)

ROUTES = DeclaredColumn(name="routes", per="first_tokens", dtype="int16", shape=(1, 2))
IMAGES = DeclaredColumn(name="images", per="items", dtype="float32", shape=(2,))
POSITIONS = DeclaredColumn(name="positions", per="token", dtype="int32", shape=(3,))
TEACHER = DeclaredColumn(name="teacher", per="response_token", dtype="float32", fill=-9)
STYLE = DeclaredColumn(name="style", per="row", dtype="int8", is_constant=True)
DIFFERING = replace(STYLE, is_constant=False)


def routes(*experts: int) -> np.ndarray[Any, Any]:
    choices = [[[expert, expert + 1]] for expert in experts]
    return np.array(choices, np.int16).reshape(-1, 1, 2)


def images(*numbers: int) -> np.ndarray[Any, Any]:
    return np.array([[number, number] for number in numbers], np.float32).reshape(-1, 2)


def with_columns(one: Turn, **extras: np.ndarray[Any, Any]) -> Turn:
    return replace(one, extras=extras)


def column_of(rows: Any, name: str) -> list[Any]:
    return [row.extras[name].values.tolist() for row in rows]


# --------------------------------------------------------------------------------------
# one kind at a time


def test_position_ids_of_shared_tokens_travel_once_and_concatenate_along_the_row() -> None:
    positions = np.arange(18, dtype=np.int32).reshape(6, 3)
    turns = [
        with_columns(turn("ab", "C"), positions=positions[:3]),
        with_columns(turn("abcd", "EF"), positions=positions),
    ]

    stored = store_turns(turns, extra_columns=[POSITIONS])
    (row,) = merge_turns(turns, extra_columns=[POSITIONS])

    assert [(p.num_shared, len(p.values)) for p in (t.extras["positions"] for t in stored)] == [
        (0, 3),
        (3, 3),
    ]
    assert spell([row]) == ["abCdEF"]
    assert row.extras["positions"].values.tolist() == positions.tolist()


def test_teacher_logprobs_have_the_declared_fill_on_observed_tokens() -> None:
    turns = [
        with_columns(turn("ab", "CD"), teacher=np.array([-1, -2], np.float32)),
        with_columns(turn("abcdef", "G"), teacher=np.array([-3], np.float32)),
    ]

    rows = merge_turns(turns, extra_columns=[TEACHER])

    assert column_of(rows, "teacher") == [[-1.0, -2.0, -9.0, -9.0, -3.0]]


def test_the_rows_of_every_trajectory_have_their_own_values() -> None:
    first = with_columns(turn("a", "B"), teacher=np.array([-1], np.float32))
    second = with_columns(turn("xy", "Z"), teacher=np.array([-2], np.float32))
    other = with_columns(turn("ab", "CD"), teacher=np.array([-3, -4], np.float32))

    merged = merge_trajectories([[first, second], [], [other]], extra_columns=[TEACHER])

    assert [column_of(rows, "teacher") for rows in merged] == [
        [[-1.0], [-2.0]],
        [],
        [[-3.0, -4.0]],
    ]


def test_a_token_has_the_choice_of_the_first_turn_that_captured_it() -> None:
    # "c" was sampled last by turn 0 and went through the model as a part of the prompt of turn 1;
    # what turn 1 captured of "a" and "b" again does not count.
    turns = [
        with_columns(turn("ab", "C"), routes=routes(1, 2)),
        with_columns(turn("abcd", "E"), routes=routes(91, 92, 3, 4)),
    ]

    stored = store_turns(turns, extra_columns=[ROUTES])
    (row,) = merge_turns(turns, extra_columns=[ROUTES])

    assert [piece.num_shared for piece in (t.extras["routes"] for t in stored)] == [0, 2]
    assert row.extras["routes"].values.tolist() == routes(1, 2, 3, 4).tolist()
    assert row.extras["routes"].ends == (2, 4)


def test_a_turn_that_was_not_captured_leaves_no_gap_once_a_later_one_was() -> None:
    optional = replace(ROUTES, is_optional=True)
    turns = [
        with_columns(turn("ab", "C"), routes=routes(1, 2)),
        turn("abcd", "E"),
        with_columns(turn("abcdef", "G"), routes=routes(91, 92, 3, 4, 5)),
    ]

    (row,) = merge_turns(turns, extra_columns=[optional])

    assert row.extras["routes"].values.tolist() == routes(1, 2, 3, 4, 5).tolist()
    assert row.extras["routes"].ends == (2, 2, 5)


def test_choices_are_stored_and_merged_in_the_narrowest_type() -> None:
    small, large = turn("ab", "C"), turn("xy", "Z")
    turns = [
        with_columns(small, routes=routes(1, 2)),
        with_columns(large, routes=routes(300)),
    ]

    stored = store_turns(turns, extra_columns=[ROUTES])

    assert [t.extras["routes"].values.dtype for t in stored] == [np.uint8, np.int16]
    assert assembled(turns, [ROUTES]).extras["routes"].dtype == np.int16
    assert assembled(turns[:1], [ROUTES]).extras["routes"].dtype == np.uint8


def test_images_concatenate_in_order_and_travel_once() -> None:
    turns = [
        with_columns(turn("ab", "C"), images=images(1)),
        with_columns(turn("abcd", "E"), images=images(1, 2, 3)),
    ]

    stored = store_turns(turns, extra_columns=[IMAGES])
    (row,) = merge_turns(turns, extra_columns=[IMAGES])

    assert stored[1].extras["images"].num_shared == 1
    assert stored[1].extras["images"].values.tolist() == images(2, 3).tolist()
    assert row.extras["images"].values.tolist() == images(1, 2, 3).tolist()


def test_a_turn_that_gives_no_items_keeps_those_of_the_tokens_it_shares() -> None:
    first = with_columns(turn("ab", "C"), images=images(1))
    turns = [first, turn("abcd", "E"), turn("abx", "Y"), turn("qr", "S")]

    rows = merge_turns(turns, extra_columns=[IMAGES])

    assert spell(rows) == ["abCdE", "abxY", "qrS"]
    assert column_of(rows, "images") == [images(1).tolist(), images(1).tolist(), []]


def test_a_prompt_that_parts_within_one_that_brought_items_has_to_say_which_it_keeps() -> None:
    first = with_columns(turn("ab", "C"), images=images(1))

    with pytest.raises(InvalidTurnError, match=r"^extras\['images'\]: is missing: .* turn 0"):
        store_turns([first, turn("ax", "Y")], extra_columns=[IMAGES])

    none = with_columns(turn("ax", "Y"), images=images())
    assert store_turns([first, none], extra_columns=[IMAGES])[1].extras == {}


def test_another_image_behind_the_same_tokens_begins_a_row_of_its_own() -> None:
    turns = [
        with_columns(turn("ab", "C"), images=images(1)),
        with_columns(turn("abcd", "E"), images=images(2)),
    ]

    stored = store_turns(turns, extra_columns=[IMAGES])
    rows = merge_turns(turns, extra_columns=[IMAGES])

    assert (stored[1].parent_turn, stored[1].shared_tokens) == (NO_PARENT, 0)
    assert spell(rows) == ["abC", "abcdE"]
    assert column_of(rows, "images") == [images(1).tolist(), images(2).tolist()]


def test_items_of_a_turn_further_up_are_not_taken_for_those_of_the_parent() -> None:
    given = [("ab", "C", 1), ("abx", "Y", 2), ("abxq", "Z", 1)]
    turns = [with_columns(turn(p, r), images=images(number)) for p, r, number in given]

    rows = merge_turns(turns, extra_columns=[IMAGES])

    assert spell(rows) == ["abC", "abxY", "abxqZ"]
    assert column_of(rows, "images") == [images(number).tolist() for *_, number in given]


def test_a_value_per_row_that_differs_is_refused_by_column_and_turns() -> None:
    turns = [
        with_columns(turn("ab", "C"), style=np.array([1], np.int8)),
        with_columns(turn("abcd", "E"), style=np.array([2], np.int8)),
    ]

    with pytest.raises(UnmergeableColumnError, match="'style' differs between turns 0 and 1"):
        merge_turns(turns, extra_columns=[DIFFERING])
    with pytest.raises(InvalidTurnError, match=r"^extras\['style'\]: 2 is not that of turn 0"):
        store_turns(turns, extra_columns=[STYLE])


def test_an_equal_value_per_row_is_kept_and_travels_once() -> None:
    value = np.array([1], np.int8)
    turns = [
        with_columns(turn("ab", "C"), style=value),
        with_columns(turn("abcd", "E"), style=value),
    ]

    rows = merge_turns(turns, extra_columns=[STYLE])
    stored = store_turns(turns, extra_columns=[STYLE])

    assert column_of(rows, "style") == [[1]]
    assert len(stored[1].extras["style"].values) == 0


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
def test_a_column_that_is_not_declared_is_refused_by_name(declared: Any) -> None:
    undeclared = with_columns(turn("ab", "C"), routes=routes(1))

    for work in (merge_turns, store_turns):
        with pytest.raises(InvalidTurnError, match=r"^extras\['routes'\]: the run declares"):
            work([undeclared], extra_columns=declared)


# --------------------------------------------------------------------------------------
# what is stored by others may be anything


@pytest.mark.parametrize(
    ("column", "piece", "message"),
    [
        (POSITIONS, ExtraPiece(0, np.zeros((2, 3), np.int32)), "0 shared and 2 own"),
        (POSITIONS, ExtraPiece(0, np.zeros((3, 3), np.int64)), "int64"),
        (TEACHER, None, "turn 0 has none"),
        (TEACHER, ExtraPiece(0, np.zeros(2, np.float32)), "0 shared and 2 own"),
        (ROUTES, ExtraPiece(0, routes(1, 2, 3, 4)), "4 values for a row of 3 tokens"),
        (ROUTES, ExtraPiece(0, routes(1).astype(np.int64)), "int64"),
        (STYLE, ExtraPiece(0, np.zeros(2, np.int8)), "0 shared and 2 own"),
        (IMAGES, ExtraPiece(3, images(1)), "turn 0 follows turn -1"),
    ],
)
def test_a_stored_column_that_cannot_be_is_refused(
    column: DeclaredColumn, piece: ExtraPiece | None, message: str
) -> None:
    (stored,) = store_turns([turn("ab", "C")])
    wrong = replace(stored, extras={} if piece is None else {column.name: piece})

    with pytest.raises(InvalidTurnError, match=message):
        assembled_of([wrong], [column])


def test_values_that_the_parent_does_not_hold_are_refused() -> None:
    first, second = store_turns(
        [with_columns(turn("ab", "C"), images=images(1)), turn("abcd", "E")], extra_columns=[IMAGES]
    )
    wrong = replace(second, extras={"images": ExtraPiece(2, images())})

    with pytest.raises(InvalidTurnError, match="2 values of turn 0, which has 1"):
        assembled_of([first, wrong], [IMAGES])


def test_a_stored_column_that_the_run_does_not_declare_is_passed_over() -> None:
    (stored,) = store_turns(
        [with_columns(turn("ab", "C"), images=images(1))], extra_columns=[IMAGES]
    )

    assert assembled_of([stored], []).extras == {}


# --------------------------------------------------------------------------------------
# the laws


@st.composite
def episodes(
    draw: st.DrawFn, *, agrees: bool = False
) -> tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...]]:
    declared = draw(declared_columns())
    turns = draw(chains() | trees())
    return draw(with_extras(turns, declared, agrees=agrees)), declared


def linked_slowly(
    turns: Sequence[Turn], declared: Sequence[DeclaredColumn]
) -> list[tuple[int, int]]:
    """(parent, shared tokens) of every turn, by comparing lists."""
    links: list[tuple[int, int]] = []
    whole = [[*t.prompt_ids.tolist(), *t.response_ids.tolist()] for t in turns]
    for index, one in enumerate(turns):
        prompt = one.prompt_ids.tolist()
        shared = [
            max(n for n in range(len(prompt) + 1) if prompt[:n] == earlier[:n])
            for earlier in whole[:index]
        ]
        most = max(shared, default=0)
        holders = [turn for turn in range(index) if shared[turn] == most]
        ending = [turn for turn in holders if len(whole[turn]) == most]
        parent = (ending or holders or [NO_PARENT])[0] if most else NO_PARENT
        for column in declared:
            if parent != NO_PARENT and most == len(whole[parent]) and column.per == "items":
                given = one.extras.get(column.name)
                before = turns[parent].extras[column.name].tolist()
                if given is not None and given.tolist()[: len(before)] != before:
                    parent, most = NO_PARENT, 0
        links.append((parent, most))
    return links


def said_slowly(
    column: DeclaredColumn, turns: Sequence[Turn], links: Sequence[tuple[int, int]]
) -> list[list[Any]]:
    """What every turn has of a column for the whole of its prompt and response, as lists."""
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


def assembled_of(stored: Sequence[StoredTurn], declared: Sequence[DeclaredColumn]) -> Rows:
    planned = plan_sequences([one.shape for one in stored], merge=True)
    key = TrajectoryKey("g0", 0)
    plan = replace(
        trajectory_plan(),
        key=key,
        sequences=planned,
        weights=(1.0,) * len(planned),
        payload_crcs=tuple(one.payload_crc for one in stored),
    )
    group = GroupPlan(group_id="g0", prompt_uid="", trajectories=(plan,))
    return assemble_rows([group], {key: stored}, first_row_id=0, extra_columns=declared)


def assembled(turns: Sequence[Turn], declared: Sequence[DeclaredColumn]) -> Rows:
    return assembled_of(store_turns(turns, extra_columns=declared), declared)


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


@given(episode=episodes(agrees=True))
def test_merge_then_split_is_the_identity(
    episode: tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...]],
) -> None:
    turns, declared = episode

    split = split_sequences(merge_turns(turns, extra_columns=declared))

    for one, again in zip(turns, split, strict=True):
        given = {name: v.tolist() for name, v in one.extras.items() if len(v)}
        assert {name: v.tolist() for name, v in again.extras.items() if len(v)} == given


@given(episode=episodes())
def test_merging_what_was_split_gives_the_same_rows(
    episode: tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...]],
) -> None:
    declared = tuple(replace(column, is_optional=True) for column in episode[1])
    rows = merge_turns(items_given(*episode), extra_columns=declared)

    split = [widened(one, declared) for one in split_sequences(rows)]
    again = merge_turns(items_given(split, declared), extra_columns=declared)

    assert [row.turns for row in again] == [row.turns for row in rows]
    for column in declared:
        assert column_of(again, column.name) == column_of(rows, column.name)


def widened(one: Turn, declared: Sequence[DeclaredColumn]) -> Turn:
    """Router choices in the declared type again."""
    types = {column.name: column.dtype for column in declared}
    return replace(one, extras={n: v.astype(types[n]) for n, v in one.extras.items()})


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


# --------------------------------------------------------------------------------------
# inert rows, and rows put together


def test_inert_rows_have_a_legal_value_of_every_declared_column() -> None:
    turns = [
        with_columns(
            turn("ab", "C"),
            images=images(1),
            positions=np.ones((3, 3), np.int32),
            routes=routes(7, 8),
            style=np.array([5], np.int8),
            teacher=np.array([-1], np.float32),
        )
    ]
    real = assembled(turns, [IMAGES, POSITIONS, ROUTES, STYLE, TEACHER])

    inert = inert_rows([-1, -2], pad_token_id=0, has_logprobs=False, extras=real.extras)

    counts = {"images": 0, "positions": 2, "routes": 0, "style": 1, "teacher": 1}
    assert {n: c.values.lengths.tolist() for n, c in inert.extras.items()} == {
        name: [count] * 2 for name, count in counts.items()
    }
    for name, column in inert.extras.items():
        assert (column.dtype, column.shape) == (real.extras[name].dtype, real.extras[name].shape)
        assert not column.values.values.any()


def test_choices_of_different_types_are_joined_in_the_wider() -> None:
    small = assembled([with_columns(turn("ab", "C"), routes=routes(1))], [ROUTES])
    large = assembled([with_columns(turn("ab", "C"), routes=routes(300))], [ROUTES])

    joined = concatenate_rows([small, large]).extras["routes"]

    assert joined.dtype == np.int16
    assert [values.tolist() for values in joined.values] == [
        routes(1).tolist(),
        routes(300).tolist(),
    ]
    assert take_rows(concatenate_rows([small, large]), [1]).extras["routes"].dtype == np.int16


def test_columns_of_another_type_are_not_joined() -> None:
    one = assembled([with_columns(turn("ab", "C"), images=images(1))], [IMAGES])
    double = replace(IMAGES, dtype="float64")
    other = assembled(
        [with_columns(turn("ab", "C"), images=images(1).astype(np.float64))], [double]
    )

    with pytest.raises(BatchingError, match="extra column 'images' is"):
        concatenate_rows([one, other])


def test_the_content_hash_covers_extra_columns() -> None:
    def content_hash(number: int) -> str:
        rows = assembled([with_columns(turn("ab", "C"), images=images(number))], [IMAGES])
        return encode_mini_batch(MiniBatch(rows=rows, info=mini_batch_info(rows))).content_hash

    assert content_hash(1) == content_hash(1)
    assert content_hash(1) != content_hash(2)


def test_linking_alone_remembers_nothing() -> None:
    index = ExtraIndex([STYLE])
    one = with_columns(turn("ab", "C"), style=np.array([1], np.int8))
    other = with_columns(turn("ab", "C"), style=np.array([2], np.int8))

    index.link(one, PrefixMatch(NO_PARENT, 0))
    linked = index.link(other, PrefixMatch(NO_PARENT, 0))

    assert linked.pieces["style"].values.tolist() == [2]
