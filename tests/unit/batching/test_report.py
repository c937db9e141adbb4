from __future__ import annotations

from turnstream.batching.merge import store_turns
from turnstream.batching.report import MergeBreak, merge_report
from turnstream.testing import turn
from turnstream.types import NO_PARENT, TrajectoryKey, Turn

KEY = TrajectoryKey("g0", 0)


def first_break(*turns: Turn) -> MergeBreak:
    return merge_report({KEY: store_turns(turns)}).breaks[0]


def test_counts_turns_rows_and_tokens() -> None:
    whole = store_turns([turn("ab", "CD"), turn("abcde", "F")])
    broken = store_turns([turn("ab", "CD"), turn("x", "Y")])

    report = merge_report({KEY: whole, TrajectoryKey("g0", 1): broken})

    assert (report.num_trajectories, report.num_turns, report.num_rows) == (2, 4, 3)
    assert (report.num_turn_tokens, report.num_row_tokens) == (16, 12)
    assert report.merge_ratio == 16 / 12
    assert [found.key.sample for found in report.breaks] == [1]


def test_names_the_first_token_that_differs() -> None:
    found = first_break(turn("ab", "CD"), turn("abcde", "F"), turn("abcxef", "G"))

    assert found == MergeBreak(KEY, 2, 0, 3, ord("d"), ord("x"))


def test_names_a_token_that_an_ancestor_holds() -> None:
    found = first_break(
        turn("ab", "CD"), turn("abcde", "F"), turn("abcdefgh", "I"), turn("ax", "Y")
    )

    assert found == MergeBreak(KEY, 3, 0, 1, ord("b"), ord("x"))


def test_a_branch_kept_the_whole_context() -> None:
    found = first_break(turn("ab", "CD"), turn("abcde", "F"), turn("abcdx", "Y"))

    assert found == MergeBreak(KEY, 2, 0, 4, None, ord("x"))


def test_a_shortened_context_has_no_token_there() -> None:
    found = first_break(turn("ab", "CD"), turn("abc", "E"))

    assert found == MergeBreak(KEY, 1, 0, 3, ord("d"), None)


def test_a_new_context_is_compared_with_the_turn_before() -> None:
    found = first_break(turn("ab", "CD"), turn("x", "Y"))

    assert store_turns([turn("ab", "CD"), turn("x", "Y")])[1].parent_turn == NO_PARENT
    assert found == MergeBreak(KEY, 1, 0, 0, ord("a"), ord("x"))


def test_a_new_context_after_several_turns_is_compared_with_all_of_the_last() -> None:
    found = first_break(turn("ab", "CD"), turn("abcde", "F"), turn("x", "Y"))

    assert found == MergeBreak(KEY, 2, 1, 0, ord("a"), ord("x"))


def test_nothing_has_a_merge_ratio_of_one() -> None:
    assert merge_report({}).merge_ratio == 1.0
