from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.continuing import continued_turns, turn_ids
from turnstream.errors import InvalidTurnError
from turnstream.testing import ids
from turnstream.types import NO_PARENT

Letters = tuple[str, str]
"""A turn: its prompt and its response."""


def continued(*trajectories: list[Letters]) -> list[int]:
    turns = [turn for own in trajectories for turn in own]
    return continued_turns(
        turn_ids(
            [ids(prompt) for prompt, _ in turns],
            [ids(response) for _, response in turns],
            num_turns=[len(own) for own in trajectories],
        )
    )


def slow_continued(*trajectories: list[Letters]) -> list[int]:
    """Compare with every earlier turn of the trajectory, letter by letter."""
    found: list[int] = []
    for turns in trajectories:
        first = len(found)
        contexts = [prompt + response for prompt, response in turns]
        for place, (prompt, _) in enumerate(turns):
            shared = [_num_shared(prompt, context) for context in contexts[:place]]
            most = max(shared, default=0)
            whole = [
                k for k in range(place) if most and shared[k] == most and len(contexts[k]) == most
            ]
            is_open = whole and first + whole[0] not in found
            found.append(first + whole[0] if is_open else NO_PARENT)
    return found


def _num_shared(left: str, right: str) -> int:
    length = 0
    while left[: length + 1] == right[: length + 1] and length < min(len(left), len(right)):
        length += 1
    return length


def test_a_prompt_that_goes_on_behind_a_turn_continues_its_row() -> None:
    turns = [("ab", "c"), ("abcd", "e"), ("xy", "z"), ("abcde", "f"), ("abc", "g")]

    places = continued(turns)

    assert places == [NO_PARENT, 0, NO_PARENT, 1, NO_PARENT]


def test_a_prompt_whose_response_was_edited_begins_a_row() -> None:
    assert continued([("ab", "cd"), ("abxd", "e")]) == [NO_PARENT, NO_PARENT]


def test_a_prompt_that_ends_inside_the_turn_before_begins_a_row() -> None:
    # The prompt of turn 2 begins with all of turn 0, and goes on behind turn 1, which does not.
    turns = [("ab", "cd"), ("abc", "de"), ("abcdef", "g")]

    places = continued(turns)

    assert places == [NO_PARENT, NO_PARENT, 1]


def test_a_prompt_goes_on_behind_the_turn_that_holds_more_of_it_than_the_one_before() -> None:
    turns = [("ab", "cd"), ("ab", "c"), ("abcde", "f")]

    places = continued(turns)

    assert places == [NO_PARENT, NO_PARENT, 0]


def test_of_two_equal_turns_the_first_is_continued() -> None:
    assert continued([("ab", "c"), ("ab", "c"), ("abcd", "e")]) == [NO_PARENT, NO_PARENT, 0]


def test_a_turn_is_continued_once() -> None:
    turns = [("ab", "c"), ("abcd", "e"), ("xy", "z"), ("abc", "f")]

    places = continued(turns)

    assert places == [NO_PARENT, 0, NO_PARENT, NO_PARENT]


def test_a_prompt_that_leaves_its_parent_inside_begins_a_row() -> None:
    assert continued([("ab", "cd"), ("x", "y"), ("abcz", "e")]) == [NO_PARENT] * 3


def test_turns_without_tokens_are_never_continued() -> None:
    assert continued([("", ""), ("", "a"), ("", ""), ("ab", "c")]) == [*[NO_PARENT] * 3, 1]


def test_a_turn_never_continues_one_of_another_trajectory() -> None:
    places = continued([("ab", "c")], [], [("abcd", "e"), ("abcde", "f")], [("abcde", "f")])

    assert places == [NO_PARENT, NO_PARENT, 1, NO_PARENT]


def test_a_prompt_is_never_taken_for_the_one_behind_it() -> None:
    # Turn 2 begins with all of turn 0, and turn 1 between them does not.
    turns = [("ab", "c"), ("abxx", "y"), ("abczzz", "w")]

    places = continued(turns)

    assert places == [NO_PARENT, NO_PARENT, 0]


def test_slices_that_do_not_lie_together_are_compared_by_their_tokens() -> None:
    prompts = [ids("axbx")[::2], ids("axbxcxdx")[::2]]
    responses = [ids("cx")[::2], ids("ex")[::2]]

    places = continued_turns(turn_ids(prompts, responses, num_turns=[2]))

    assert places == [NO_PARENT, 0]


@pytest.mark.parametrize("field", ["prompt_ids", "response_ids"])
def test_ids_of_another_type_are_refused(field: str) -> None:
    # Bytes are compared: ids of 8 bytes shared nothing with any, and turns did not merge.
    arrays = {"prompt_ids": [ids("a"), ids("abc")], "response_ids": [ids("b"), ids("d")]}
    wide: dict[str, list[Any]] = {**arrays, field: [ids("a"), np.array([97, 98])]}

    with pytest.raises(InvalidTurnError, match=f"{field}: are int64, not int32"):
        turn_ids(wide["prompt_ids"], wide["response_ids"], num_turns=[2])


def test_nothing_continues_nothing() -> None:
    assert continued() == []


letters = st.text("ab", max_size=3)


@st.composite
def episodes(draw: st.DrawFn) -> list[Letters]:
    """Turns that recall all or a part of an earlier one."""
    turns: list[Letters] = []
    for _ in range(draw(st.integers(0, 7))):
        known = draw(st.sampled_from(["", *[prompt + response for prompt, response in turns]]))
        kept = known[: len(known) - draw(st.integers(0, 2))]
        turns.append((kept + draw(letters), draw(letters)))
    return turns


@given(st.lists(episodes(), max_size=4))
def test_agrees_with_comparing_every_earlier_turn(trajectories: list[list[Letters]]) -> None:
    assert continued(*trajectories) == slow_continued(*trajectories)
