from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from testkit import ids, turn
from turnstream.batching.merge.columns import RowPieces, shared_pieces, stored_row, token_columns
from turnstream.batching.merge.merging import store_turns
from turnstream.errors import BatchingError, InvalidTurnError
from turnstream.types import VersionRun


def test_a_turn_that_names_more_tokens_than_its_parent_has_is_refused() -> None:
    stored = store_turns([turn("ab", "CD"), turn("abcde", "F")])
    broken = [stored[0], replace(stored[1], shared_tokens=9)]

    with pytest.raises(InvalidTurnError, match="shared_tokens: 9 tokens of turn 0, which has 4"):
        shared_pieces(broken, 1)


def test_a_turn_that_follows_a_later_one_is_refused() -> None:
    stored = store_turns([turn("ab", "CD"), turn("abcde", "F")])
    broken = [stored[0], replace(stored[1], parent_turn=1)]

    with pytest.raises(InvalidTurnError, match="parent_turn: turn 1 follows turn 1"):
        shared_pieces(broken, 1)


def test_more_tokens_than_int32_offsets_count_are_refused() -> None:
    (one,) = store_turns([turn("a", "B")])
    wide = RowPieces(2**31 - 1, [one.token_ids], [one], [(0, 1)])

    with pytest.raises(BatchingError, match="2147483648 values in one mini-batch"):
        token_columns([wide])


def test_the_trained_tokens_of_every_row_are_counted() -> None:
    stored = store_turns([turn("ab", "Cd"), turn("abcde", "FG"), turn("x", "y")])

    columns = token_columns([stored_row(stored, [0, 1]), stored_row(stored, [2])])

    assert columns.num_trained() == [3, 0]


def test_version_runs_of_a_row_are_joined_and_empty_ones_dropped() -> None:
    given = [
        replace(turn("ab", "CD"), version_runs=(VersionRun(3, 1), VersionRun(3, 1))),
        replace(turn("abcd", ""), version_runs=(VersionRun(4, 0),)),
        replace(turn("abcd", "EF"), version_runs=(VersionRun(3, 1), VersionRun(5, 1))),
        replace(turn("abcdefg", "H"), version_runs=(VersionRun(5, 1),)),
        replace(turn("x", "Y"), version_runs=(VersionRun(5, 1),)),
        turn("z", ""),
    ]
    turns = [store_turns([own])[0] for own in given]
    pieces = [
        RowPieces(2, [], turns[:4], [(0, 2), (2, 2), (2, 4), (5, 6)]),
        RowPieces(1, [], turns[4:5], [(0, 1)]),
        RowPieces(1, [], turns[5:], [(0, 0)]),
    ]
    for row in pieces:
        row.ids.append(ids("a" * (row.prompt_length + row.spans[-1][1])))

    columns = token_columns(pieces)

    assert [row.tolist() for row in columns.run_versions] == [[3, 5, -1, 5], [5], []]
    assert [row.tolist() for row in columns.run_counts] == [[3, 1, 1, 1], [1], []]
    assert (columns.run_versions.values.dtype, columns.run_counts.values.dtype) == (
        np.int64,
        np.int32,
    )
