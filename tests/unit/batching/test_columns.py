from __future__ import annotations

from dataclasses import replace

import pytest

from testkit import turn
from turnstream.batching.merge.columns import RowPieces, shared_pieces, token_columns
from turnstream.batching.merge.storing import store_turns
from turnstream.errors import BatchingError, InvalidTurnError


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
    wide = RowPieces([one], [0], 2**31 - 1, [one.token_ids], [(0, 1)])

    with pytest.raises(BatchingError, match="2147483648 values in one mini-batch"):
        token_columns([wide])
