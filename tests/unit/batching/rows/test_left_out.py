"""Turns that are left out of the rows: which these are, and the rows without them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import testkit
from testkit import assert_same, shape, spell, turn
from testkit.planning import assembled_rows, plan, stored_group
from testkit.strategies import declared_columns, forests, trees, with_extras
from turnstream.batching.merge.left_out import left_out
from turnstream.batching.merge.merging import merge_turns, plan_sequences, store_turns
from turnstream.batching.merge.plan import GroupPlan
from turnstream.errors import InvalidTurnError
from turnstream.types import NO_PARENT, DeclaredColumn, Turn, TurnShape

ASKED_AGAIN = [shape(5, 3), shape(0, 2, parent=0, shared=5)]
CHOSEN = [*ASKED_AGAIN, shape(4, 1, parent=1, shared=7)]


def whole(one: Turn) -> list[int]:
    return [*one.prompt_ids.tolist(), *one.response_ids.tolist()]


@pytest.mark.parametrize(
    ("prompts", "superseded", "expected"),
    [
        ("a|B a|C aCd|E", [], [0]),
        ("a|B a|C", [], []),  # no later turn has chosen
        ("a|B aBc|D aBc|E aBcEf|G", [], [1]),  # siblings inside a row
        ("a|B aBc|D aBc|E aBcEf|G aBcDf|H", [], []),  # both are continued
        ("a|B aBc|D aBx|E", [], []),  # other prompts are no siblings
        ("a|B a|C a|D aDe|F", [], [0, 1]),
        ("a| a|C aCd|E", [], [0]),  # an aborted call
        ("a|B a|C aBd|E a|F", [], [1, 3]),  # a sibling that came later
        ("a|B a|C", [0], [0]),
        ("a|B aBc|D", [0], []),  # a continued turn is always kept
        ("a|B a|C", [0, 1], [0]),  # never all turns
        ("a|B aC|D", [1], [1]),
    ],
)
def test_turn_is_left_out_while_a_sibling_is_continued(
    prompts: str, superseded: list[int], expected: list[int]
) -> None:
    turns = [turn(*each.split("|")) for each in prompts.split()]
    shapes = [one.shape for one in store_turns(turns)]

    assert sorted(left_out(shapes, siblings="mask", superseded=superseded)) == expected
    always = {each for each in superseded if each in expected}
    assert left_out(shapes, siblings="train", superseded=superseded) == always
    if always == {*expected}:
        assert left_out(shapes, siblings="refuse", superseded=superseded) == always
        return
    with pytest.raises(InvalidTurnError, match=r"siblings: turns \d and \d have the same prompt"):
        left_out(shapes, siblings="refuse", superseded=superseded)


def test_refused_siblings_are_named_and_unknown_turns_refused() -> None:
    with pytest.raises(InvalidTurnError, match=r"turns 0 and 1 .* only turn 1 is continued"):
        left_out(CHOSEN, siblings="refuse")
    for wrong in (-1, 3):
        with pytest.raises(InvalidTurnError, match=f"superseded: names turn {wrong} of .* 3 turns"):
            left_out(CHOSEN, siblings="train", superseded=[wrong])


def test_siblings_have_the_same_items() -> None:
    assert left_out(CHOSEN, siblings="mask", others=["x", "x", "y"]) == {0}
    assert left_out(CHOSEN, siblings="mask", others=["y", "x", "y"]) == frozenset()


@given(turns=forests() | trees(max_turns=7))
def test_siblings_are_the_turns_with_equal_prompts(turns: tuple[Turn, ...]) -> None:
    shapes = [one.shape for one in store_turns(turns)]
    continued = {
        s.parent_turn
        for s in shapes
        if s.parent_turn != NO_PARENT and s.shared_tokens > len(turns[s.parent_turn].prompt_ids)
    }

    found = left_out(shapes, siblings="mask")

    expected = {
        index
        for index, one in enumerate(turns)
        if index not in continued
        and any(whole_prompt(turns[other]) == whole_prompt(one) for other in continued)
    }
    assert found <= expected
    if len({tuple(whole(one)) for one in turns}) == len(turns):
        responses = [tuple(one.response_ids.tolist()) for one in turns]
        if len({*responses}) == len(responses) and () not in responses:
            assert found == expected


def whole_prompt(one: Turn) -> list[int]:
    return one.prompt_ids.tolist()


def test_row_continues_with_the_prompt_that_a_left_out_turn_brought() -> None:
    texts = ["a|B", "abcx|D", "abcx|E", "abcxef|G"]
    turns = [turn(*text.split("|"), logprobs=-0.5) for text in texts]
    turns[1] = replace(turns[1], logprobs=None)  # no row reads it

    rows = assembled_rows(store_turns(turns), (), {1})

    assert spell(rows) == ["aBcxEfG"]
    assert rows.logprobs is not None
    assert [own.tolist() for own in rows.logprobs] == [[-0.5, 0, 0, -0.5, 0, -0.5]]


@st.composite
def episodes(draw: st.DrawFn) -> tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...], set[int]]:
    """Turns, the columns of their run, and some turns whose calls were repeated."""
    turns = draw(forests())
    declared = draw(st.just(()) | declared_columns())
    superseded = draw(st.sets(st.integers(0, len(turns) - 1)))
    return draw(with_extras(turns, declared, agrees=True)), declared, superseded


@given(episode=episodes())
def test_rows_are_those_without_the_turns_that_are_left_out(
    episode: tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...], set[int]],
) -> None:
    turns, declared, superseded = episode
    stored = store_turns(turns, extra_columns=declared)
    shapes = [one.shape for one in stored]
    unused = left_out(shapes, siblings="mask", superseded=superseded)
    kept = [one for index, one in enumerate(turns) if index not in unused]

    rows = assembled_rows(stored, declared, unused)

    expected = assembled_rows(store_turns(kept, extra_columns=declared), declared)
    assert_same(rows, expected)
    numbers = [index for index in range(len(turns)) if index not in unused]
    marked = [s._replace(is_left_out=index in unused) for index, s in enumerate(shapes)]
    planned = plan_sequences(marked, merge=True)
    merged = merge_turns(kept, extra_columns=declared)
    assert [row.turns for row in planned] == [
        tuple(numbers[index] for index in row.turns) for row in merged
    ]


@given(turns=trees(max_turns=7), data=st.data())
def test_kept_turns_are_whole_and_trained_once_whatever_they_repeat(
    turns: tuple[Turn, ...], data: st.DataObject
) -> None:
    stored = store_turns(turns)
    superseded = data.draw(st.sets(st.integers(0, len(turns) - 1)))
    shapes = [one.shape for one in stored]
    unused = left_out(shapes, siblings="mask", superseded=superseded)
    marked = [s._replace(is_left_out=index in unused) for index, s in enumerate(shapes)]

    rows = assembled_rows(stored, (), unused)

    planned = plan_sequences(marked, merge=True)
    assert sorted(index for row in planned for index in row.turns) == [
        index for index in range(len(turns)) if index not in unused
    ]
    for row, tokens in zip(planned, rows.input_ids, strict=True):
        for index in row.turns:
            assert tokens.tolist()[: len(whole(turns[index]))] == whole(turns[index])


@pytest.mark.parametrize("estimator", ["grpo", "gigpo", "rloo"])
@pytest.mark.parametrize("source", ["outcome", "sum_of_turns", "last_turn"])
def test_plan_scores_a_trajectory_as_without_the_turns_left_out(
    estimator: Any, source: Any
) -> None:
    texts = ["a|B", "a|CX", "aCXd|E", "aCXd|FYZ"]
    turns = [
        turn(*text.split("|"), rewards=number + 0.5, anchor=number % 3)
        for number, text in enumerate(texts)
    ]
    other = [turn("a", "G", rewards=0.25, anchor=0), turn("aGh", "I", rewards=2.0, anchor=1)]
    config = replace(
        testkit.config(),
        estimator=estimator,
        reward_source=source,
        overlong_buffer=2,
        overlong_length=5,
    )
    plans: list[GroupPlan] = []
    for own, unused in ((turns, {0, 3}), (turns[1:3], set[int]())):
        group, _ = stored_group(own, other, rewards=[0.75, 0.25])
        first, second = group.members
        shapes, rewards = [*first.turns], [*first.turn_rewards]
        for index in unused:
            shapes[index] = shapes[index]._replace(num_trained_tokens=0, is_left_out=True)
            rewards[index] = 0.0
        marked = replace(first, turns=tuple(shapes), turn_rewards=tuple(rewards))
        (planned,) = plan(replace(group, members=(marked, second)), of=config).groups
        plans.append(planned)

    found, expected = (each.trajectories[0] for each in plans)

    assert (found.left_out, expected.left_out) == ({0, 3}, set())
    for name in ("reward", "advantage", "weights", "num_turn_tokens", "has_logprobs"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.turn_advantages[1:3] == expected.turn_advantages
    assert {*found.turn_advantages[::3]} <= {0.0}
    assert plans[0].trajectories[1] == plans[1].trajectories[1]
    assert [row.num_trained_tokens for row in found.sequences] == [3]


def deep(num_turns: int) -> Sequence[TurnShape]:
    """Turns of which each has a shorter prompt than its parent, and no new token."""
    later = [shape(0, 1, parent=n, shared=num_turns - n) for n in range(num_turns - 1)]
    return [shape(num_turns, 1), *later]


def test_ten_thousand_nested_prompts_are_compared_within_a_second_of_cpu() -> None:
    shapes = [*deep(9_999), shape(1, 1, parent=9_998, shared=3)]
    start = time.process_time()

    left_out(shapes, siblings="mask")

    assert time.process_time() - start < 1
