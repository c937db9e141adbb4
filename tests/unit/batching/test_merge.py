from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.columns import RowPieces, shared_pieces, stored_row, token_columns
from turnstream.batching.merge import (
    merge_trajectories,
    merge_turns,
    plan_sequences,
    split_sequences,
    store_turns,
    turn_prompts,
)
from turnstream.batching.plan import SequenceShape
from turnstream.errors import BatchingError, InvalidTurnError
from turnstream.testing import assert_same, ids, shape, spell, turn
from turnstream.testing.strategies import trees
from turnstream.types import Sequence, StoredTurn, Turn, VersionRun

FIRST = turn("ab", "CD", logprobs=[-0.1, -0.2], rewards=[0, 0])


def rewards(rows: list[Sequence]) -> list[list[float]]:
    return [row.rewards.tolist() for row in rows]


# --------------------------------------------------------------------------------------
# the numbered cases of the reference, with "turn 1" = FIRST


def test_case_12_a_prompt_that_extends_everything_continues_the_row() -> None:
    second = turn("abcdef", "G", logprobs=[-0.3], rewards=[1])

    (row,) = merge_turns([FIRST, second])

    assert spell([row]) == ["abCDefG"]
    assert row.loss_mask.tolist() == [1, 1, 0, 0, 1]
    assert row.logprobs is not None
    np.testing.assert_array_equal(row.logprobs, np.array([-0.1, -0.2, 0, 0, -0.3], np.float32))
    assert row.rewards.tolist() == [0, 0, 0, 0, 1]


def test_case_13_a_prompt_of_exactly_everything_continues_without_a_gap() -> None:
    rows = merge_turns([FIRST, turn("abcd", "G", logprobs=-0.3)])

    assert spell(rows) == ["abCDG"]


def test_case_14_a_prompt_that_extends_the_prompt_alone_starts_a_row() -> None:
    rows = merge_turns([FIRST, turn("abef", "G", logprobs=-0.3)])

    assert spell(rows) == ["abCD", "abefG"]


def test_case_15_a_shorter_prompt_starts_a_row() -> None:
    rows = merge_turns([FIRST, turn("a", "G", logprobs=-0.3)])

    assert spell(rows) == ["abCD", "aG"]


def test_case_16_scalar_rewards_of_merged_turns_are_summed() -> None:
    # The reference keeps only the last: merged [1.0], split [.25, 1.0]. A reward of ours stands on
    # its turn's last token, so that a row holds the sum of its turns' rewards, however it is split.
    first = turn("ab", "CD", rewards=0.25)

    merged = merge_turns([first, turn("abcdef", "G", rewards=1.0)])
    split = merge_turns([first, turn("xy", "G", rewards=1.0)])

    assert [row.rewards.sum() for row in merged] == [1.25]
    assert [row.rewards.sum() for row in split] == [0.25, 1.0]


def test_case_17_token_rewards_of_three_turns_accumulate() -> None:
    second, third = turn("abcdef", "G", rewards=[1]), turn("abcdefgh", "I", rewards=[2])

    rows = merge_turns([turn("ab", "CD", rewards=[0, 0]), second, third])

    assert rewards(rows) == [[0, 0, 0, 0, 1, 0, 2]]


def test_case_18_a_row_after_a_break_grows_itself() -> None:
    rows = merge_turns([turn("ab", "CD"), turn("x", "Y"), turn("xyz", "U")])

    assert spell(rows) == ["abCD", "xYzU"]
    assert [row.turns for row in rows] == [(0,), (1, 2)]


def test_case_19_trajectories_whose_tokens_chain_never_merge() -> None:
    rows = merge_trajectories([[turn("a", "B")], [turn("abc", "D")]])

    assert [spell(own) for own in rows] == [["aB"], ["abcD"]]


def test_case_20_a_masked_turn_keeps_its_tokens() -> None:
    (row,) = merge_turns([turn("ab", "cd"), turn("abcdef", "G")])

    assert row.input_ids.tolist() == [ord(letter) for letter in "abcdefg"]
    assert row.loss_mask.tolist() == [0, 0, 0, 0, 1]


def test_case_20_a_turn_without_response_is_merged_too() -> None:
    (row,) = merge_turns([turn("ab", ""), turn("abc", "D")])

    assert spell([row]) == ["abcD"]
    assert (row.prompt_length, row.loss_mask.tolist()) == (2, [0, 1])


def test_case_21_without_logprobs_there_are_none() -> None:
    (row,) = merge_turns([turn("ab", "CD"), turn("abcdef", "G")])

    assert row.logprobs is None


def test_case_21_a_turn_without_logprobs_beside_one_with_has_nan_where_it_is_trained() -> None:
    (row,) = merge_turns([turn("ab", "CdE"), turn("abcdef", "G", logprobs=-0.3)])

    assert row.logprobs is not None
    np.testing.assert_array_equal(row.logprobs, np.array([np.nan, 0, np.nan, 0, -0.3], np.float32))


def test_case_22_no_turn_is_dropped() -> None:
    # The reference drops rows after the last `is_last_step` silently: 2 rows in, 1 out.
    turns = [turn("ab", "CD"), turn("x", "Y")]

    rows = merge_turns(turns)

    assert sorted(index for row in rows for index in row.turns) == [0, 1]


def test_case_23_what_belongs_to_a_turn_comes_back_with_it() -> None:
    # The reference fails with KeyError: 0 on fields that are a dict of lists.
    turns = [turn("ab", "CD", version=3), turn("abcdef", "G", version=4), turn("x", "Y", version=5)]

    rows = merge_turns(turns)

    assert rows[0].version_runs == (VersionRun(3, 2), VersionRun(None, 2), VersionRun(4, 1))
    assert [t.version_runs for t in split_sequences(rows)] == [t.version_runs for t in turns]


# --------------------------------------------------------------------------------------
# the tree


def test_alternating_agents_make_a_row_each() -> None:
    turns = [turn("ab", "C"), turn("xy", "Z"), turn("abcd", "E"), turn("xyzu", "V")]

    rows = merge_turns(turns)

    assert spell(rows) == ["abCdE", "xyZuV"]
    assert [row.turns for row in rows] == [(0, 2), (1, 3)]


def test_a_branch_trains_the_shared_turn_once() -> None:
    rows = merge_turns([turn("ab", "CD"), turn("abcde", "F"), turn("abcdx", "Y")])

    assert spell(rows) == ["abCDeF", "abcdxY"]


def test_samples_of_one_context_make_a_row_each_and_one_goes_on() -> None:
    rows = merge_turns([turn("ab", "CD"), turn("ab", "CE"), turn("abcef", "G")])

    assert spell(rows) == ["abCD", "abCEfG"]


def test_of_two_equal_turns_the_first_is_gone_on_with() -> None:
    rows = merge_turns([turn("ab", "CD"), turn("ab", "CD"), turn("abcde", "F")])

    assert [row.turns for row in rows] == [(0, 2), (1,)]


def test_rows_are_ordered_by_their_first_turn() -> None:
    rows = merge_turns([turn("ab", "C"), turn("xy", "Z"), turn("abc", "D")])

    assert [row.turns[0] for row in rows] == [0, 1]


def test_without_merging_every_turn_is_a_row() -> None:
    shapes = [shape(2, 3), shape(1, 2, parent=0, shared=5, trained=1)]

    rows = plan_sequences(shapes, merge=False)

    assert rows == (SequenceShape((0,), 2, 5, 3), SequenceShape((1,), 6, 8, 1))


def test_planned_rows_have_the_lengths_of_their_turns() -> None:
    shapes = [
        shape(2, 3),
        shape(1, 2, parent=0, shared=5, trained=1),
        shape(0, 4, parent=0, shared=4),
    ]

    rows = plan_sequences(shapes, merge=True)

    assert rows == (SequenceShape((0, 1), 2, 8, 4), SequenceShape((2,), 4, 8, 4))


def test_no_turns_make_no_rows() -> None:
    assert merge_turns([]) == []


@pytest.mark.parametrize("field", ["logprobs", "loss_mask", "rewards"])
def test_refuses_an_array_of_another_length_than_its_response(field: str) -> None:
    dtype = np.uint8 if field == "loss_mask" else np.float32
    short = Turn(
        **{
            "prompt_ids": FIRST.prompt_ids,
            "response_ids": FIRST.response_ids,
            field: np.ones(1, dtype),
        }
    )

    with pytest.raises(InvalidTurnError, match=f"{field}: 1 values for 2 response tokens"):
        merge_turns([short])


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
    one = turn("a", "B")
    wide = RowPieces(2**31 - 1, [one.prompt_ids, one.response_ids], [one], [0], [(0, 1)])

    with pytest.raises(BatchingError, match="2147483648 tokens in one mini-batch"):
        token_columns([wide])


# --------------------------------------------------------------------------------------
# laws


def slow_merge(turns: tuple[Turn, ...]) -> list[tuple[list[int], list[list[float]]]]:
    """Rows by lists: for each, its turns, and (token, mask, logprob, reward, version) per token."""
    contexts: list[list[int]] = []
    rows: list[tuple[list[int], list[list[float]]]] = []
    for index, own in enumerate(turns):
        prompt = own.prompt_ids.tolist()
        # The longest beginning that an earlier turn holds; of several, one that ends there.
        best = (0, False, 0)
        for earlier, context in enumerate(contexts):
            length = 0
            for a, b in zip(context, prompt, strict=False):
                if a != b:
                    break
                length += 1
            best = max(best, (length, length == len(context), -earlier))
        length, is_whole, parent = best[0], best[1], -best[2]
        row = next((r for r in rows if length and is_whole and r[0][-1] == parent), None)
        response = own.response_ids.tolist()
        if row is None:
            row = ([], [[token, 0, 0, 0, -1] for token in prompt])
            rows.append(row)
        else:
            row[1].extend([token, 0, 0, 0, -1] for token in prompt[length:])
        versions = [run.version for run in own.version_runs for _ in range(run.num_tokens)]
        for t, token in enumerate(response):
            trained = 1 if own.loss_mask is None else int(own.loss_mask[t])
            logprob = own.logprobs[t] if own.logprobs is not None else (np.nan if trained else 0)
            reward = 0 if own.rewards is None else own.rewards[t]
            version = versions[t] if versions else None
            row[1].append([token, trained, logprob, reward, -1 if version is None else version])
        row[0].append(index)
        contexts.append([*prompt, *response])
    return rows


def as_lists(rows: list[Sequence]) -> list[tuple[list[int], list[list[float]]]]:
    result: list[tuple[list[int], list[list[float]]]] = []
    for row in rows:
        pad = [0.0] * row.prompt_length
        num_tokens = len(row.loss_mask)
        logprobs = (
            [np.nan if m else 0 for m in row.loss_mask] if row.logprobs is None else row.logprobs
        )
        versions = [
            -1 if run.version is None else run.version
            for run in row.version_runs
            for _ in range(run.num_tokens)
        ]
        assert len(versions) == num_tokens
        columns = [
            row.input_ids.tolist(),
            [*pad, *row.loss_mask],
            [*pad, *logprobs],
            [*pad, *row.rewards],
            [*([-1] * row.prompt_length), *versions],
        ]
        result.append((list(row.turns), [list(token) for token in zip(*columns, strict=True)]))
    return result


@given(trees(max_turns=6))
def test_agrees_with_merging_lists_token_by_token(turns: tuple[Turn, ...]) -> None:
    rows = merge_turns(turns)

    expected = slow_merge(turns)
    found = as_lists(rows)
    assert [own for own, _ in found] == [own for own, _ in expected]
    for (_, tokens), (_, expected_tokens) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.array(tokens), np.array(expected_tokens))


@given(trees(max_turns=6))
def test_every_array_of_a_row_has_its_promised_type(turns: tuple[Turn, ...]) -> None:
    for row in merge_turns(turns):
        assert (row.input_ids.dtype, row.loss_mask.dtype, row.rewards.dtype) == (
            np.int32,
            np.uint8,
            np.float32,
        )
        assert row.logprobs is None or row.logprobs.dtype == np.float32


@given(trees(max_turns=6))
def test_every_sampled_token_is_trained_exactly_once(turns: tuple[Turn, ...]) -> None:
    rows = merge_turns(turns)

    spans = sorted(
        (index, row.loss_mask[begin:end].tolist())
        for row in rows
        for index, (begin, end) in zip(row.turns, row.turn_spans, strict=True)
    )
    masks = [
        [1] * len(own.response_ids) if own.loss_mask is None else own.loss_mask.tolist()
        for own in turns
    ]
    assert spans == list(enumerate(masks))
    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(map(sum, masks))


@given(trees(max_turns=6))
def test_tokens_in_are_tokens_out(turns: tuple[Turn, ...]) -> None:
    """A row holds all of its last turn's context: what merging saves is said again by no row."""
    rows = merge_turns(turns)

    contexts = [len(own.prompt_ids) + len(own.response_ids) for own in turns]
    assert [len(row.input_ids) for row in rows] == [contexts[row.turns[-1]] for row in rows]
    assert sorted(index for row in rows for index in row.turns) == list(range(len(turns)))
    responses = sum(len(own.response_ids) for own in turns)
    assert sum(end - begin for row in rows for begin, end in row.turn_spans) == responses


@given(trees(max_turns=6))
def test_merging_then_splitting_is_the_identity(turns: tuple[Turn, ...]) -> None:
    rows = merge_turns(turns)

    split = split_sequences(rows)

    row_has_logprobs = {index: row.logprobs is not None for row in rows for index in row.turns}
    expected = [plain(own, in_row_with_logprobs=row_has_logprobs[i]) for i, own in enumerate(turns)]
    assert_same([plain(own, in_row_with_logprobs=False) for own in split], expected)


def plain(own: Turn, *, in_row_with_logprobs: bool) -> Turn:
    """A turn with everything spelled out that None stands for."""
    num_tokens = len(own.response_ids)
    loss_mask = np.ones(num_tokens, np.uint8) if own.loss_mask is None else own.loss_mask
    logprobs = own.logprobs
    if logprobs is None and in_row_with_logprobs and not loss_mask.any():
        logprobs = np.zeros(num_tokens, np.float32)
    runs: list[VersionRun] = []
    for run in own.version_runs:
        if runs and runs[-1].version == run.version:
            runs[-1] = VersionRun(run.version, runs[-1].num_tokens + run.num_tokens)
        else:
            runs.append(run)
    return Turn(
        prompt_ids=own.prompt_ids,
        response_ids=own.response_ids,
        logprobs=logprobs,
        loss_mask=loss_mask,
        rewards=np.zeros(num_tokens, np.float32) if own.rewards is None else own.rewards,
        version_runs=tuple(runs) if any(run.version is not None for run in runs) else (),
    )


@given(trees(max_turns=6))
def test_storing_then_restoring_prompts_is_the_identity(turns: tuple[Turn, ...]) -> None:
    stored = store_turns(turns)

    assert_same(turn_prompts(stored), [own.prompt_ids for own in turns])


@given(trees(max_turns=6))
def test_lengths_alone_give_the_rows_that_the_tokens_give(turns: tuple[Turn, ...]) -> None:
    planned = plan_sequences([own.shape for own in store_turns(turns)], merge=True)

    rows = merge_turns(turns)
    assert planned == tuple(
        SequenceShape(row.turns, row.prompt_length, len(row.input_ids), int(row.loss_mask.sum()))
        for row in rows
    )


@given(trees(max_turns=6))
def test_a_stored_turn_holds_no_token_that_an_earlier_one_holds(turns: tuple[Turn, ...]) -> None:
    stored = store_turns(turns)

    sent = sum(len(own.token_ids) for own in stored)
    full = sum(len(own.prompt_ids) + len(own.response_ids) for own in turns)
    assert sent == full - sum(own.shared_tokens for own in stored)


def test_merging_many_trajectories_at_once_gives_the_rows_of_each() -> None:
    first, other = [turn("ab", "CD"), turn("abcde", "F"), turn("x", "Y")], [turn("ab", "C")]

    merged = merge_trajectories([first, [], other])

    assert len(merged) == 3
    assert [spell(rows) for rows in merged] == [["abCDeF", "xY"], [], ["abC"]]
    assert spell(merged[-1]) == ["abC"]
    assert [spell(rows) for rows in merged[1:]] == [[], ["abC"]]
    with pytest.raises(IndexError):
        merged[3]


@given(st.lists(trees(max_turns=4), max_size=4))
def test_trajectories_never_change_each_other(episodes: list[tuple[Turn, ...]]) -> None:
    has_logprobs = any(own.logprobs is not None for turns in episodes for own in turns)

    merged = merge_trajectories(episodes)

    assert (merged.columns.logprobs is not None) == has_logprobs
    for rows, turns in zip(merged, episodes, strict=True):
        alone = merge_turns(turns)
        assert [row.turn_spans for row in rows] == [row.turn_spans for row in alone]
        assert_same([row.input_ids for row in rows], [row.input_ids for row in alone])
        assert_same([row.loss_mask for row in rows], [row.loss_mask for row in alone])
        assert_same([row.rewards for row in rows], [row.rewards for row in alone])
        assert [row.version_runs for row in rows] == [row.version_runs for row in alone]


def test_the_trained_tokens_of_every_row_are_counted() -> None:
    stored = store_turns([turn("ab", "Cd"), turn("abcde", "FG"), turn("x", "y")])

    columns = token_columns([stored_row(stored, [0, 1]), stored_row(stored, [2])])

    assert columns.num_trained() == [3, 0]


def test_runs_of_one_version_are_one_run_of_their_row_and_empty_ones_none() -> None:
    turns: list[Turn | StoredTurn] = [
        replace(turn("ab", "CD"), version_runs=(VersionRun(3, 1), VersionRun(3, 1))),
        replace(turn("abcd", ""), version_runs=(VersionRun(4, 0),)),
        replace(turn("abcd", "EF"), version_runs=(VersionRun(3, 1), VersionRun(5, 1))),
        replace(turn("abcdefg", "H"), version_runs=(VersionRun(5, 1),)),
        replace(turn("x", "Y"), version_runs=(VersionRun(5, 1),)),
        turn("z", ""),
    ]
    pieces = [
        RowPieces(2, [], turns[:4], [0, 1, 2, 3], [(0, 2), (2, 2), (2, 4), (5, 6)]),
        RowPieces(1, [], turns[4:5], [4], [(0, 1)]),
        RowPieces(1, [], turns[5:], [5], [(0, 0)]),
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
