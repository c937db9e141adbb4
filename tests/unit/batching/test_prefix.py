from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.prefix import PrefixIndex, PrefixMatch
from turnstream.errors import InvalidTurnError
from turnstream.testing import ids
from turnstream.testing.strategies import trees
from turnstream.types import NO_PARENT, Turn

NOTHING = PrefixMatch(NO_PARENT, 0)


def index_of(*turns: tuple[str, str]) -> PrefixIndex:
    index = PrefixIndex()
    for prompt, response in turns:
        index.add(index.link(ids(prompt)), ids(prompt), ids(response))
    return index


def slow_link(earlier: list[list[int]], prompt: list[int]) -> PrefixMatch:
    """Compare with every earlier turn, token by token."""
    shared = [
        next((i for i, (a, b) in enumerate(zip(e, prompt, strict=False)) if a != b), None)
        for e in earlier
    ]
    lengths = [
        min(len(e), len(prompt)) if s is None else s for e, s in zip(earlier, shared, strict=True)
    ]
    most = max(lengths, default=0)
    if most == 0:
        return NOTHING
    holders = [turn for turn, length in enumerate(lengths) if length == most]
    whole = [turn for turn in holders if len(earlier[turn]) == most]
    return PrefixMatch((whole or holders)[0], most)


def links(turns: tuple[Turn, ...] | list[Turn]) -> tuple[list[PrefixMatch], list[PrefixMatch]]:
    """What the index says of every turn, and what the slow loop says."""
    index, at_once = PrefixIndex(), PrefixIndex()
    earlier: list[list[int]] = []
    found: list[PrefixMatch] = []
    expected: list[PrefixMatch] = []
    for turn in turns:
        found.append(index.link(turn.prompt_ids))
        expected.append(slow_link(earlier, turn.prompt_ids.tolist()))
        index.add(found[-1], turn.prompt_ids, turn.response_ids)
        earlier.append([*turn.prompt_ids.tolist(), *turn.response_ids.tolist()])
        assert at_once.link_and_add(turn.prompt_ids, turn.response_ids) == found[-1]
    return found, expected


@pytest.mark.parametrize(
    ("turns", "prompt", "expected"),
    [
        ([], "ab", NOTHING),
        ([("ab", "c")], "", NOTHING),
        ([("ab", "c")], "xyz", NOTHING),
        ([("ab", "c")], "abcd", PrefixMatch(0, 3)),
        ([("ab", "c")], "abc", PrefixMatch(0, 3)),
        ([("ab", "c")], "abx", PrefixMatch(0, 2)),
        ([("ab", "c")], "a", PrefixMatch(0, 1)),
        ([("ab", "c"), ("abcd", "e")], "abcdef", PrefixMatch(1, 5)),
        ([("ab", "c"), ("abcd", "e")], "abcx", PrefixMatch(0, 3)),
        ([("ab", "c"), ("abcd", "e")], "abcdx", PrefixMatch(1, 4)),
        ([("ab", "c"), ("xy", "z"), ("abcd", "e")], "xyzu", PrefixMatch(1, 3)),
        ([("ab", "c"), ("xy", "z"), ("abcd", "e")], "abcdef", PrefixMatch(2, 5)),
        ([("ab", "c"), ("abx", "y")], "abxyz", PrefixMatch(1, 4)),
        ([("ab", "c"), ("abx", "y")], "abz", PrefixMatch(0, 2)),
    ],
)
def test_finds_the_longest_known_beginning_and_who_holds_it(
    turns: list[tuple[str, str]], prompt: str, expected: PrefixMatch
) -> None:
    index = index_of(*turns)

    match = index.link(ids(prompt))

    assert match == expected


def test_prefers_the_lowest_turn_that_ends_there_over_a_lower_one_that_goes_on() -> None:
    index = index_of(("abcde", "f"), ("ab", "c"), ("ab", "c"))

    match = index.link(ids("abcx"))

    assert match == PrefixMatch(1, 3)


def test_knows_samples_of_the_same_prompt_whose_responses_begin_alike() -> None:
    index = index_of(("ab", "cd"), ("ab", "ce"), ("ab", "cef"))

    matches = [index.link(ids(prompt)) for prompt in ("abcdx", "abcex", "abcefx", "abcx")]

    assert matches == [PrefixMatch(0, 4), PrefixMatch(1, 4), PrefixMatch(2, 5), PrefixMatch(0, 3)]


def test_a_continued_partial_response_shares_all_of_its_prompt() -> None:
    index = index_of(("ab", "cd"), ("abcd", "ef"))

    match = index.link(ids("abcdef"))

    assert match == PrefixMatch(1, 6)


def test_a_turn_is_never_its_own_parent() -> None:
    # Without a new token it ends inside a response, where nothing ended before.
    index = index_of(("ab", "cd"))

    match = index.link_and_add(ids("abc"), ids(""))

    assert match == PrefixMatch(0, 3)


def test_a_turn_that_ended_inside_an_earlier_one_does_not_hide_it() -> None:
    index = index_of(("abc", "d"), ("ab", ""))

    match = index.link(ids("abcde"))

    assert match == PrefixMatch(0, 4)


def test_memory_is_free_as_soon_as_the_index_is() -> None:
    # Lines that referred to each other in a circle would stay until the garbage collector runs.
    index = index_of(("ab", "c"), ("abx", "y"))
    gc.collect()

    del index

    assert gc.collect() == 0


def test_keeps_its_own_copy_of_the_tokens() -> None:
    index = PrefixIndex()
    prompt, response = ids("ab"), ids("c")

    index.add(index.link(prompt), prompt, response)
    prompt[:] = 0
    response[:] = 0

    assert index.link(ids("abc")) == PrefixMatch(0, 3)


def test_takes_slices_that_are_not_contiguous() -> None:
    index = index_of(("ab", "c"))

    match = index.link(ids("axbxcxdx")[::2])

    assert match == PrefixMatch(0, 3)


@pytest.mark.parametrize("position", [0, 1023, 1024, 1025, 9215, 9216, 9217, 9999])
def test_finds_the_first_difference_wherever_it_is(position: int) -> None:
    # Blocks of growing length are compared: a difference may be the first or last of one.
    context = np.arange(10_000, dtype=np.int32)
    index = PrefixIndex()
    index.add(index.link(context), context, ids("x"))
    edited = context.copy()
    edited[position] = -1

    match = index.link(edited)

    assert match == (PrefixMatch(0, position) if position else NOTHING)


@given(trees(max_turns=8))
def test_agrees_with_comparing_every_earlier_turn(turns: tuple[Turn, ...]) -> None:
    found, expected = links(turns)

    assert found == expected


@given(st.integers(0, 2**32 - 1))
def test_agrees_with_the_slow_loop_on_long_contexts_that_are_edited_anywhere(seed: int) -> None:
    rng = np.random.default_rng(seed)
    contexts = [rng.integers(0, 3, 3000).astype(np.int32)]
    turns: list[Turn] = []
    for _ in range(6):
        known = contexts[rng.integers(len(contexts))]
        kept = known[: rng.integers(len(known) // 2, len(known) + 1)]
        prompt = np.concatenate((kept, rng.integers(0, 3, rng.integers(0, 5)))).astype(np.int32)
        response = rng.integers(0, 3, rng.integers(0, 1500)).astype(np.int32)
        turns.append(Turn(prompt_ids=prompt, response_ids=response))
        contexts.append(np.concatenate((prompt, response)))

    found, expected = links(turns)

    assert found == expected


def test_token_ids_of_another_type_are_refused() -> None:
    # Bytes are compared: ids of 8 bytes shared nothing with any, and turns did not merge.
    index, wide = PrefixIndex(), np.array([97, 98])

    with pytest.raises(InvalidTurnError, match="prompt_ids: are int64, not int32"):
        index.link(wide)
    with pytest.raises(InvalidTurnError, match="response_ids: are int64, not int32"):
        index.add(index.link(ids("ab")), ids("ab"), wide)
    with pytest.raises(InvalidTurnError, match="prompt_ids: are int64, not int32"):
        index.link_and_add(wide, ids("c"))
    with pytest.raises(InvalidTurnError, match="response_ids: are int64, not int32"):
        index.link_and_add(ids("ab"), wide)
    assert index.link(ids("ab")) == PrefixMatch(NO_PARENT, 0)
