from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from testkit import assert_same, ids, spell, turn
from testkit.links import linked_slowly
from testkit.strategies import trees
from turnstream.batching.merge.columns import merged_turns, shared_pieces, token_columns
from turnstream.batching.merge.merging import merge_turns, plan_sequences, store_turns, turn_prompts
from turnstream.batching.merge.plan import SequenceShape
from turnstream.batching.merge.prefix import PrefixIndex, PrefixMatch
from turnstream.errors import BatchingError, InvalidTurnError
from turnstream.types import NO_PARENT, Sequence, StoredTurns, Turn, VersionRun


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ([("abcd", "G")], ["abCDG"]),  # case 13: exactly everything
        ([("abef", "G")], ["abCD", "abefG"]),  # case 14: the prompt alone
        ([("a", "G")], ["abCD", "aG"]),  # case 15: a shorter prompt
        ([("x", "Y"), ("xyz", "U")], ["abCD", "xYzU"]),  # case 18: a row after a break
    ],
)
def test_cases_13_14_15_18_prompt_continues_only_the_row_it_holds(
    later: list[tuple[str, str]], expected: list[str]
) -> None:
    assert spell(merge_turns([turn("ab", "CD"), *[turn(*each) for each in later]])) == expected


def test_case_21_trained_turn_without_logprobs_has_nan() -> None:
    # Without any log-probability the column is None, as in the reference.
    (none,) = merge_turns([turn("ab", "CD"), turn("abcdef", "G")])
    (row,) = merge_turns([turn("ab", "CdE"), turn("abcdef", "G", logprobs=-0.3)])

    assert (none.logprobs, none.token_weights) == (None, None)
    assert row.logprobs is not None
    np.testing.assert_array_equal(row.logprobs, np.array([np.nan, 0, np.nan, 0, -0.3], np.float32))


@pytest.mark.parametrize("field", ["logprobs", "loss_mask", "rewards", "token_weights"])
def test_refuses_an_array_of_another_length_than_its_response(field: str) -> None:
    dtype = np.uint8 if field == "loss_mask" else np.float32
    short = replace(turn("ab", "CD"), **{field: np.ones(1, dtype)})

    with pytest.raises(InvalidTurnError, match=f"{field}: 1 values for 2 response tokens"):
        merge_turns([short])


@pytest.mark.parametrize("counts", [(2,), (1, 3)])
def test_refuses_version_runs_that_do_not_cover_the_response(counts: tuple[int, ...]) -> None:
    # The versions of the row's later turns stood beside tokens that they had not sampled.
    runs = tuple(VersionRun(version, count) for version, count in enumerate(counts))
    wrong = replace(turn("ab", "CDE"), version_runs=runs)

    with pytest.raises(InvalidTurnError, match=f"version_runs: {sum(counts)} of 3 response tokens"):
        merge_turns([turn("x", "Y", version=1), wrong])


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("loss_mask", np.array([1, 0.25]), "loss_mask: 0.25 at response token 1 is neither 0 nor"),
        ("loss_mask", np.array([2, 1], np.uint8), "loss_mask: 2 at response token 0 is neither"),
        ("loss_mask", np.array([256, 1]), "loss_mask: 256 at response token 0 is neither 0 nor 1"),
        ("loss_mask", np.array([1.0, 0.0]), "loss_mask: is float64, not uint8"),
        (
            "rewards",
            np.array([0, 1e300]),
            r"rewards: 1e\+300 at response token 1 is more than float",
        ),
        ("rewards", np.array(["a", "b"]), "rewards: is str32, not float32"),
        ("logprobs", np.array([-1e39, 0]), r"logprobs: -1e\+39 at response token 0 is more than"),
    ],
)
def test_refuses_a_value_that_its_column_cannot_hold(field: str, values: Any, message: str) -> None:
    with pytest.raises(InvalidTurnError, match=message):
        merge_turns([turn("x", "YZ"), replace(turn("ab", "CD"), **{field: values})])


def test_a_mask_of_booleans_is_a_mask() -> None:
    (row,) = merge_turns([replace(turn("ab", "CD"), loss_mask=np.array([False, True]))])

    assert_same(row.loss_mask, np.array([0, 1], np.uint8))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"shared_tokens": 9}, "shared_tokens: 9 values of turn 0, which has 4"),
        ({"parent_turn": 1}, "parent_turn: turn 1 follows turn 1"),
    ],
)
def test_turn_that_shares_what_no_earlier_turn_has_is_refused(
    damage: dict[str, int], message: str
) -> None:
    first, second = store_turns([turn("ab", "CD"), turn("abcde", "F")])

    with pytest.raises(InvalidTurnError, match=message):
        shared_pieces(StoredTurns.of([first, replace(second, **damage)]), 1)


def test_more_tokens_than_int32_offsets_count_are_refused() -> None:
    (one,) = store_turns([turn("a", "B")])
    wide = replace(one, shared_tokens=2**31 - 2)

    with pytest.raises(BatchingError, match="2147483648 values in one mini-batch"):
        token_columns(merged_turns(StoredTurns.of([wide]), [[0]]))


def slow_merge(turns: tuple[Turn, ...]) -> list[tuple[list[int], list[list[float]]]]:
    """Rows by lists: the turns, and (token, mask, logprob, reward, weight, version) per token."""
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
        row[1].extend([token, 0, 0, 0, 0, -1] for token in prompt[len(row[1]) :])
        versions = [run.version for run in own.version_runs for _ in range(run.num_tokens)]
        for t, token in enumerate(response):
            trained = 1 if own.loss_mask is None else int(own.loss_mask[t])
            logprob = own.logprobs[t] if own.logprobs is not None else (np.nan if trained else 0)
            reward = 0 if own.rewards is None else own.rewards[t]
            weight = trained if own.token_weights is None else own.token_weights[t]
            version = versions[t] if versions else None
            row[1].append(
                [token, trained, logprob, reward, weight, -1 if version is None else version]
            )
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
            [*pad, *(row.loss_mask if row.token_weights is None else row.token_weights)],
            [*([-1] * row.prompt_length), *versions],
        ]
        result.append((list(row.turns), [list(token) for token in zip(*columns, strict=True)]))
    return result


@given(trees(max_turns=6))
def test_rows_are_those_of_merging_lists_token_by_token(turns: tuple[Turn, ...]) -> None:
    rows, stored = merge_turns(turns), store_turns(turns)

    expected = slow_merge(turns)
    found = as_lists(rows)
    assert [own for own, _ in found] == [own for own, _ in expected]
    for (_, tokens), (_, expected_tokens) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.array(tokens), np.array(expected_tokens))
    # The lengths of stored turns give the same rows, and their prompts can be restored.
    assert plan_sequences([own.shape for own in stored], merge=True) == tuple(
        SequenceShape(row.turns, row.prompt_length, len(row.input_ids), int(row.loss_mask.sum()))
        for row in rows
    )
    assert_same(turn_prompts(stored), [own.prompt_ids for own in turns])


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
    for own in turns:
        found.append(link(index, own.prompt_ids))
        index.add(found[-1], own.prompt_ids, own.response_ids)

    assert found == linked_slowly(turns)


def test_token_ids_of_another_type_are_refused() -> None:
    # Bytes are compared: ids of 8 bytes shared nothing with any, and turns did not merge.
    index, wide = PrefixIndex(), np.array([97, 98])

    with pytest.raises(InvalidTurnError, match="prompt_ids: are int64, not int32"):
        link(index, wide)
    with pytest.raises(InvalidTurnError, match="response_ids: are int64, not int32"):
        index.add(link(index, ids("ab")), ids("ab"), wide)
    assert link(index, ids("ab")) == PrefixMatch(NO_PARENT, 0)
