from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import ids
from turnstream.batching.continuing import continued_turns, turn_ids
from turnstream.errors import InvalidTurnError
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
    """A list of rows; a prompt continues the longest that it begins with, of equal ones the newest.

    Of each row its letters and its last turn.
    """
    found: list[int] = []
    for turns in trajectories:
        rows: list[tuple[str, int]] = []
        for prompt, response in turns:
            held = [row for row in rows if prompt.startswith(row[0])]
            best = max(held, key=lambda row: (len(row[0]), row[1]), default=("", NO_PARENT))
            rows = [row for row in rows if row != best] + [(prompt + response, len(found))]
            found.append(best[1])
    return found


def test_a_prompt_that_goes_on_behind_a_turn_continues_its_row() -> None:
    turns = [("ab", "c"), ("abcd", "e"), ("xy", "z"), ("abcde", "f"), ("abc", "g")]

    places = continued(turns)

    assert places == [NO_PARENT, 0, NO_PARENT, 1, NO_PARENT]


def test_a_prompt_whose_response_was_edited_begins_a_row() -> None:
    assert continued([("ab", "cd"), ("abxd", "e")]) == [NO_PARENT, NO_PARENT]


def test_a_prompt_that_another_goes_on_behind_begins_a_row_if_a_response_was_edited() -> None:
    assert continued([("ab", "cd"), ("abxd", "e"), ("abxdef", "g")]) == [NO_PARENT, NO_PARENT, 1]


def test_a_prompt_that_ends_inside_the_turn_before_begins_a_row() -> None:
    # The prompt of turn 2 begins with all of turn 0, and goes on behind turn 1, which does not.
    turns = [("ab", "cd"), ("abc", "de"), ("abcdef", "g")]

    places = continued(turns)

    assert places == [NO_PARENT, NO_PARENT, 1]


def test_a_prompt_goes_on_behind_the_turn_that_holds_more_of_it_than_the_one_before() -> None:
    turns = [("ab", "cd"), ("ab", "c"), ("abcde", "f")]

    places = continued(turns)

    assert places == [NO_PARENT, NO_PARENT, 0]


def test_of_two_equal_rows_the_newest_is_continued_and_then_the_other() -> None:
    turns = [("ab", "c"), ("ab", "c"), ("abcd", "e"), ("abcx", "f"), ("abcy", "g")]

    places = continued(turns)

    assert places == [NO_PARENT, NO_PARENT, 1, 0, NO_PARENT]


def test_a_prompt_goes_on_behind_a_turn_that_added_no_token() -> None:
    # The lowest turn that ends there was asked alone, and had been gone on with already.
    assert continued([("ab", "c"), ("abc", ""), ("abcd", "e")]) == [NO_PARENT, 0, 1]
    assert continued([("ab", ""), ("ab", ""), ("ab", "c")]) == [NO_PARENT, 0, 1]


def test_a_longer_beginning_of_another_turn_does_not_hide_a_row_that_is_held_whole() -> None:
    turns = [("abcdef", "g"), ("ab", "c"), ("abcdx", "e")]

    places = continued(turns)

    assert places == [NO_PARENT, NO_PARENT, 1]


def test_of_several_rows_the_longest_that_is_held_whole_is_continued() -> None:
    turns = [("abcd", "e"), ("ab", "c"), ("a", "b"), ("abcdef", "g"), ("abcdxy", "h")]

    places = continued(turns)

    assert places == [NO_PARENT, NO_PARENT, NO_PARENT, 0, 1]


def test_a_row_that_a_prompt_left_is_continued_by_a_later_one_that_holds_it() -> None:
    # Where a prompt left the row it is asked about first, and the rest of it is asked as well.
    turns = [("abcd", "e"), ("axcde", "f"), ("abxde", "f"), ("abcxe", "f"), ("abcde", "g")]

    places = continued(turns)

    assert places == [NO_PARENT, NO_PARENT, NO_PARENT, NO_PARENT, 0]


def test_a_turn_is_continued_once() -> None:
    turns = [("ab", "c"), ("abcd", "e"), ("xy", "z"), ("abc", "f")]

    places = continued(turns)

    assert places == [NO_PARENT, 0, NO_PARENT, NO_PARENT]


def test_a_prompt_that_leaves_its_parent_inside_begins_a_row() -> None:
    assert continued([("ab", "cd"), ("x", "y"), ("abcz", "e")]) == [NO_PARENT] * 3


def test_a_row_without_tokens_is_a_beginning_of_every_prompt() -> None:
    turns = [("", ""), ("", "a"), ("", ""), ("ab", "c"), ("xy", "z")]

    places = continued(turns)

    assert places == [NO_PARENT, 0, NO_PARENT, 1, 2]


def test_a_turn_never_continues_one_of_another_trajectory() -> None:
    places = continued([("ab", "c")], [], [("abcd", "e"), ("abcde", "f")], [("abcde", "f")])

    assert places == [NO_PARENT, NO_PARENT, 1, NO_PARENT]


def test_a_prompt_is_never_taken_for_the_one_behind_it() -> None:
    # Turn 2 begins with all of turn 0, and turn 1 between them does not.
    turns = [("ab", "c"), ("abxx", "y"), ("abczyz", "w")]

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
        kept = known[: len(known) - draw(st.just(0) | st.integers(0, 4))]
        again = st.sampled_from([("", ""), *turns]).map(lambda turn: turn[1])
        turns.append((kept + draw(letters), draw(letters | again)))
    return turns


@given(st.lists(episodes(), max_size=4))
def test_agrees_with_comparing_every_earlier_turn(trajectories: list[list[Letters]]) -> None:
    assert continued(*trajectories) == slow_continued(*trajectories)
