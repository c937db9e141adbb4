from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from testkit import assert_same
from testkit.strategies import trees
from turnstream.batching.merge.columns import TokenColumns, stored_row, token_columns
from turnstream.batching.merge.merging import (
    merge_turns,
    plan_sequences,
    turn_prompts,
)
from turnstream.batching.merge.plan import SequenceShape
from turnstream.batching.merge.storing import store_turns
from turnstream.types import Ragged, Sequence, Turn


def slow_merge(turns: tuple[Turn, ...]) -> list[tuple[list[int], list[list[float]]]]:
    """Rows by lists: for each, its turns, and (token, mask, logprob, reward, version) per token."""
    rows: list[tuple[list[int], list[list[float]]]] = []
    for index, own in enumerate(turns):
        prompt, response = own.prompt_ids.tolist(), own.response_ids.tolist()
        # A prompt continues the longest row that it begins with; of equal rows the newest, which
        # is what a loop over all turns has in hand.
        held = [row for row in rows if [int(t[0]) for t in row[1]] == prompt[: len(row[1])]]
        if held:
            row = max(held, key=lambda row: (len(row[1]), row[0][-1]))
        else:
            row = ([], [])
            rows.append(row)
        row[1].extend([token, 0, 0, 0, -1] for token in prompt[len(row[1]) :])
        versions = [run.version for run in own.version_runs for _ in range(run.num_tokens)]
        for t, token in enumerate(response):
            trained = 1 if own.loss_mask is None else int(own.loss_mask[t])
            logprob = own.logprobs[t] if own.logprobs is not None else (np.nan if trained else 0)
            reward = 0 if own.rewards is None else own.rewards[t]
            version = versions[t] if versions else None
            row[1].append([token, trained, logprob, reward, -1 if version is None else version])
        row[0].append(index)
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
    """One that begins a row shares the longest beginning, any other all of the row before it."""
    stored = store_turns(turns)

    before = {
        turn: earlier
        for row in merge_turns(turns)
        for earlier, turn in zip(row.turns, row.turns[1:], strict=False)
    }
    contexts = [[*own.prompt_ids.tolist(), *own.response_ids.tolist()] for own in turns]
    for index, own in enumerate(stored):
        prompt = turns[index].prompt_ids.tolist()
        shared = [num_shared(context, prompt) for context in contexts[:index]]
        if index in before:
            expected = len(contexts[before[index]])
            assert own.parent_turn == before[index]
        else:
            expected = max(shared, default=0)
        assert own.shared_tokens == expected
        assert len(own.token_ids) == len(contexts[index]) - expected


def num_shared(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@given(st.lists(trees(max_turns=4), max_size=4))
def test_shared_columns_are_to_the_bit_what_loops_over_lists_write(
    episodes: list[tuple[Turn, ...]],
) -> None:
    pieces = [
        stored_row(stored, row.turns)
        for stored in map(store_turns, episodes)
        for row in plan_sequences([own.shape for own in stored], merge=True)
    ]

    rows = [
        tokens[len(turns[own[0]].prompt_ids) :]
        for turns in episodes
        for own, tokens in slow_merge(turns)
    ]
    whole = [tokens for turns in episodes for _, tokens in slow_merge(turns)]
    runs = [
        [(version, len([*own])) for version, own in itertools.groupby(token[4] for token in row)]
        for row in rows
    ]
    has_logprobs = any(own.logprobs is not None for turns in episodes for own in turns)

    def column(place: int, dtype: type[Any], of: list[Any] = rows) -> Ragged[Any]:
        return Ragged.from_rows([[token[place] for token in row] for row in of], dtype)

    expected = TokenColumns(
        input_ids=column(0, np.int32, whole),
        loss_mask=column(1, np.uint8),
        logprobs=column(2, np.float32) if has_logprobs else None,
        rewards=column(3, np.float32),
        run_versions=column(0, np.int64, runs),
        run_counts=column(1, np.int32, runs),
    )
    assert_same(token_columns(pieces), expected)
