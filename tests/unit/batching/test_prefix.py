from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from testkit import ids
from testkit.links import linked_slowly
from testkit.strategies import trees
from turnstream.batching.merge.prefix import PrefixIndex, PrefixMatch
from turnstream.errors import InvalidTurnError
from turnstream.types import NO_PARENT, Turn

NOTHING = PrefixMatch(NO_PARENT, 0)


def link(index: PrefixIndex, prompt_ids: NDArray[Any]) -> PrefixMatch:
    return next(index.matches(prompt_ids))


def index_of(*turns: tuple[str, str]) -> PrefixIndex:
    index = PrefixIndex()
    for prompt, response in turns:
        index.add(link(index, ids(prompt)), ids(prompt), ids(response))
    return index


def test_a_turn_that_is_stored_without_a_parent_leaves_every_row_open() -> None:
    index = index_of(("ab", "c"))

    index.add(NOTHING, ids("abcd"), ids("e"))

    assert [*index.matches(ids("abcdef"))][:2] == [PrefixMatch(1, 5), PrefixMatch(0, 3)]


def test_memory_is_free_as_soon_as_the_index_is() -> None:
    # Lines that referred to each other in a circle would stay until the garbage collector runs.
    index = index_of(("ab", "c"), ("abx", "y"))
    gc.collect()

    del index

    assert gc.collect() == 0


def test_keeps_its_own_copy_of_the_tokens_and_takes_slices() -> None:
    index = PrefixIndex()
    prompt, response = ids("ab"), ids("c")

    index.add(link(index, prompt), prompt, response)
    prompt[:] = 0
    response[:] = 0

    assert link(index, ids("axbxcxdx")[::2]) == PrefixMatch(0, 3)  # which is not contiguous


@pytest.mark.parametrize("position", [0, 1023, 1024, 1025, 9215, 9216, 9217, 9999])
def test_finds_the_first_difference_wherever_it_is(position: int) -> None:
    # Blocks of growing length are compared: a difference may be the first or last of one.
    context = np.arange(10_000, dtype=np.int32)
    index = PrefixIndex()
    index.add(link(index, context), context, ids("x"))
    edited = context.copy()
    edited[position] = -1

    match = link(index, edited)

    assert match == (PrefixMatch(0, position) if position else NOTHING)


@given(trees(max_turns=8))
def test_agrees_with_comparing_every_earlier_turn(turns: tuple[Turn, ...]) -> None:
    index = PrefixIndex()
    found: list[PrefixMatch] = []
    for turn in turns:
        found.append(link(index, turn.prompt_ids))
        index.add(found[-1], turn.prompt_ids, turn.response_ids)

    assert found == linked_slowly(turns)


def test_token_ids_of_another_type_are_refused() -> None:
    # Bytes are compared: ids of 8 bytes shared nothing with any, and turns did not merge.
    index, wide = PrefixIndex(), np.array([97, 98])

    with pytest.raises(InvalidTurnError, match="prompt_ids: are int64, not int32"):
        link(index, wide)
    with pytest.raises(InvalidTurnError, match="response_ids: are int64, not int32"):
        index.add(link(index, ids("ab")), ids("ab"), wide)
    assert link(index, ids("ab")) == PrefixMatch(NO_PARENT, 0)
