"""Every layout, compared with placing values token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import assert_same, rows
from testkit.strategies import scored_rows
from turnstream.batching.layouts.jagged import Jagged, jagged
from turnstream.batching.layouts.packed import Packed, line_up, packed
from turnstream.batching.layouts.padded import (
    LeftPadded,
    RightPadded,
    left_padded,
    left_padded_column,
    right_padded,
)
from turnstream.batching.rows.assemble import take_rows
from turnstream.errors import BatchingError, RowTooLongError
from turnstream.types import Ragged, Rows

PAD = 7
DTYPES: dict[str, Any] = {
    "input_ids": np.int64,
    "position_ids": np.int64,
    "attention_mask": np.bool_,
    "response_mask": np.bool_,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "rewards": np.float32,
    "advantages": np.float32,
    "token_weights": np.float32,
}


def slow_tokens(batch: Rows, b: int, *, fill: int = 0) -> dict[str, list[Any]]:
    """Return the columns of tokens, and `fill` times padding after them."""
    tokens = batch.input_ids[b].tolist()
    return {
        "input_ids": tokens + [PAD] * fill,
        "position_ids": [*range(len(tokens) + fill)],
        "attention_mask": [True] * len(tokens) + [False] * fill,
    }


def slow_responses(batch: Rows, b: int) -> dict[str, list[Any]]:
    """Return the columns of response tokens."""
    mask = batch.loss_mask[b].tolist()
    advantages = [batch.advantage[b]] * len(mask)
    if batch.advantages is not None:
        advantages = batch.advantages[b].tolist()
    columns = {
        "response_mask": [True] * len(mask),
        "loss_mask": mask,
        "rewards": batch.rewards[b].tolist(),
        "advantages": [a if trained else 0 for a, trained in zip(advantages, mask, strict=True)],
    }
    for name in ("logprobs", "token_weights"):
        column: Ragged[np.float32] | None = getattr(batch, name)
        if column is not None:
            columns[name] = column[b].tolist()
    return columns


def slow_slots(batch: Rows, b: int, num_slots: int) -> dict[str, list[Any]]:
    """Return all columns of a row of so many slots: a slot scores the token after it."""
    prompt, length = int(batch.prompt_length[b]), len(batch.input_ids[b])
    columns = slow_tokens(batch, b, fill=num_slots - length)
    for name, values in slow_responses(batch, b).items():
        columns[name] = [*[0] * prompt, *values, *[0] * (num_slots - length), 0][1:]
        columns[name] = columns[name][:num_slots]
    return columns


def arrays(columns: dict[str, Any], names: str, suffix: str, shape: tuple[int, ...]) -> Any:
    """Return the named columns as arrays; None for those that the rows do not have."""
    return {
        f"{name}_{suffix}": np.array(columns[name], DTYPES[name]).reshape(shape)
        if name in columns
        else None
        for name in names.split()
    }


def listed(parts: list[dict[str, list[Any]]], *, joined: bool) -> dict[str, list[Any]]:
    names = parts[0] if parts else {}
    return {
        name: [value for part in parts for value in (part[name] if joined else [part[name]])]
        for name in names
    }


RESPONSES = "loss_mask logprobs rewards advantages token_weights"


def per_row(batch: Rows, own: list[int]) -> dict[str, Any]:
    return {"row_id_B": batch.row_id[own], "prompt_length_B": batch.prompt_length[own]}


def slow_left_padded(batch: Rows, *, width: int, response_width: int) -> LeftPadded:
    parts: list[dict[str, list[Any]]] = []
    for b in range(len(batch)):
        tokens = slow_tokens(batch, b)
        left = width - len(tokens["input_ids"])
        own = {
            "input_ids": [PAD] * left + tokens["input_ids"],
            "attention_mask": [False] * left + tokens["attention_mask"],
        }
        for name, values in slow_responses(batch, b).items():
            own[name] = [0] * (response_width - len(values)) + values
        parts.append(own)
    columns, num_rows = listed(parts, joined=False), len(batch)
    return LeftPadded(
        **arrays(columns, "input_ids attention_mask", "BT", (num_rows, width)),
        **arrays(columns, f"response_mask {RESPONSES}", "BR", (num_rows, response_width)),
    )


@given(st.data(), scored_rows().filter(len), st.integers(0, 3), st.sampled_from([1, 2, 3, 4]))
def test_every_layout_agrees_with_placing_token_by_token(
    data: st.DataObject, batch: Rows, more: int, alignment: int
) -> None:
    everything = list(range(len(batch)))
    response_width = int(batch.loss_mask.lengths.max(initial=0)) + data.draw(st.integers(0, 3))
    width = max(int(batch.input_ids.lengths.max(initial=0)), response_width) + more
    widths = {"width": width, "response_width": response_width}

    left = left_padded(batch, pad_token_id=PAD, **widths)
    assert_same(left, slow_left_padded(batch, **widths))
    assert not left.advantages_BR[~left.loss_mask_BR].view(np.uint32).any()  # -0.0 is not 0.0

    columns = listed([slow_slots(batch, b, width) for b in everything], joined=False)
    names = f"input_ids attention_mask {RESPONSES}"
    expected = RightPadded(
        **arrays(columns, names, "BT", (len(batch), width)),
        **per_row(batch, everything),
        response_length_B=batch.loss_mask.lengths,
    )
    assert_same(right_padded(batch, width=width, pad_token_id=PAD), expected)

    order = data.draw(st.permutations(everything))
    bins = [list(order[:more]), list(order[more:])]
    for own, found in zip(
        bins, packed(batch, bins=bins, pad_token_id=PAD, alignment=alignment), strict=True
    ):
        slots = [-(-len(batch.input_ids[b]) // alignment) * alignment for b in own]
        parts = [slow_slots(batch, b, n) for b, n in zip(own, slots, strict=True)]
        columns = listed(parts or [slow_slots(batch, 0, width)], joined=True)
        columns = columns if parts else {name: [] for name in columns}
        expected = Packed(
            **arrays(columns, f"input_ids position_ids {RESPONSES}", "N", (-1,)),
            **per_row(batch, own),
            cu_seqlens=np.cumsum([0, *slots]).astype(np.int32),
            length_B=batch.input_ids.lengths[own],
            response_length_B=batch.loss_mask.lengths[own],
        )
        assert_same(found, expected)


@given(scored_rows().filter(len))
def test_jagged_rows_agree_with_placing_token_by_token(batch: Rows) -> None:
    found = jagged(batch)

    tokens = listed([slow_tokens(batch, b) for b in range(len(batch))], joined=True)
    responses = listed([slow_responses(batch, b) for b in range(len(batch))], joined=True)
    expected = Jagged(
        **arrays(tokens, "input_ids position_ids", "N", (-1,)),
        **arrays(responses, RESPONSES, "M", (-1,)),
        **per_row(batch, list(range(len(batch)))),
        offsets=batch.input_ids.offsets.astype(np.int64),
        response_offsets=batch.loss_mask.offsets.astype(np.int64),
    )
    assert_same(found, expected)
    starts = zip(batch.input_ids.offsets, batch.prompt_length, batch.loss_mask, strict=False)
    assert found.scoring_tokens_M.tolist() == [
        start + prompt + j - 1 if prompt + j else -1
        for start, prompt, response in starts
        for j in range(len(response))
    ]


@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_long_rows_agree_with_placing_token_by_token(seed: int, num_rows: int) -> None:
    # From some hundred tokens on a row is copied, where short ones go through their mask.
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 1500, (num_rows, 2)).tolist()
    batch = rows(*["a" * prompt + "|" + "bB" * (count // 2) for prompt, count in lengths])
    numbers = rng.standard_normal(len(batch.rewards.values)).astype(np.float32)
    batch = replace(
        batch,
        rewards=Ragged(numbers, batch.rewards.offsets),
        logprobs=Ragged(-abs(numbers), batch.rewards.offsets),
        advantage=rng.standard_normal(num_rows).astype(np.float32),
    )
    widths = {
        "width": int(batch.input_ids.lengths.max()),
        "response_width": int(batch.loss_mask.lengths.max()),
    }

    found = left_padded(batch, pad_token_id=PAD, **widths)

    assert_same(found, slow_left_padded(batch, **widths))


def test_bins_of_nothing_are_empty() -> None:
    assert packed(rows("aB"), bins=[], pad_token_id=0) == []
    [empty] = packed(rows("aB"), bins=[[]], pad_token_id=0)
    assert (empty.cu_seqlens.tolist(), empty.max_length) == ([0], 0)


def test_alignment_below_one_is_refused() -> None:
    with pytest.raises(BatchingError, match="alignment=0 must be at least 1"):
        packed(rows("aB"), bins=[[0]], pad_token_id=PAD, alignment=0)


def test_more_slots_than_int32_counts_are_refused() -> None:
    batch = rows("aB", "aB")
    offsets = np.array([0, 2**30, 2**31 - 1], np.int32)  # their tokens are not read
    wide = replace(batch, input_ids=Ragged(batch.input_ids.values, offsets))

    with pytest.raises(BatchingError, match="slots in one bin: cu_seqlens are int32"):
        line_up(wide, bins=[[0, 1, 0]], alignment=1)
    order, _, starts = line_up(wide, bins=[[0], [1]], alignment=1)

    assert (order.tolist(), starts.tolist()) == ([0, 1], [0, 2**30, 2**31 - 1])


def test_array_of_the_right_type_is_not_copied() -> None:
    batch = rows("abC", "aB")
    assert batch.logprobs is not None

    made = jagged(batch)

    assert made.logprobs_M is not None
    assert np.shares_memory(made.logprobs_M, batch.logprobs.values)
    assert np.shares_memory(made.loss_mask_M, batch.loss_mask.values)


def pad(batch: Rows, *, width: int | None = None, response_width: int | None = None) -> LeftPadded:
    return left_padded(
        batch,
        width=int(batch.input_ids.lengths.max(initial=0)) if width is None else width,
        response_width=int(batch.loss_mask.lengths.max(initial=0))
        if response_width is None
        else response_width,
        pad_token_id=PAD,
    )


def test_positions_count_from_the_first_real_token() -> None:
    padded = pad(rows("ab|C", "|d"))

    assert padded.position_ids_BT.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert padded.position_ids_BT.dtype == np.int64


def test_case_9_row_longer_than_the_width_is_refused() -> None:
    # The reference is as wide as its longest row, and above its limit warns once; nothing is cut.
    long = rows("aB", "abcdE")

    assert right_padded(rows("abcD"), width=4, pad_token_id=PAD).input_ids_BT.shape == (1, 4)
    assert pad(rows("ab|CD", "abc|D"), width=4).input_ids_BT.shape == (2, 4)
    for lay_out, refused in [
        (lambda: right_padded(long, width=4, pad_token_id=PAD), (1, 5, 4)),
        (lambda: pad(long, width=4), (1, 5, 4)),
        (lambda: pad(rows("ab|C", "a|BC"), response_width=1), (1, 2, 1)),
    ]:
        with pytest.raises(RowTooLongError) as caught:
            lay_out()
        assert caught.value.args == refused


@pytest.mark.parametrize("width", [32_767, 32_768, 40_000])
def test_a_mask_counts_its_columns_also_beyond_int16(width: int) -> None:
    padded = pad(rows("a|B", "|"), width=width, response_width=width)

    assert np.argwhere(padded.attention_mask_BT).tolist() == [[0, width - 2], [0, width - 1]]
    assert np.argwhere(padded.response_mask_BR).tolist() == [[0, width - 1]]
    assert padded.position_ids_BT[0, -2:].tolist() == [0, 1]
    right = right_padded(rows("|" + "a" * width, "ab|"), width=width, pad_token_id=PAD)
    assert np.count_nonzero(right.attention_mask_BT, axis=1).tolist() == [width, 2]


@pytest.mark.parametrize("num_tokens", [3, 700])
@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int64, np.complex64])
def test_a_declared_column_keeps_its_type_and_the_shape_of_its_values(
    num_tokens: int, dtype: type[np.generic]
) -> None:
    batch = rows("ab" + "C" * num_tokens, "a|BC")
    values = np.arange(2 * num_tokens + 4).reshape(-1, 2).astype(dtype)
    column = Ragged(values, batch.loss_mask.offsets)

    whole = left_padded_column(column, batch, response_width=num_tokens)
    first = left_padded_column(
        Ragged(values[:, 0], column.offsets), batch, response_width=num_tokens
    )

    assert whole.dtype == first.dtype == dtype
    assert whole.tolist() == [
        values[:num_tokens].tolist(),
        [[0, 0]] * (num_tokens - 2) + values[num_tokens:].tolist(),
    ]
    assert (whole[..., 0] == first).all()


@pytest.mark.parametrize("num_tokens", [3, 700])
def test_rows_may_begin_and_end_inside_larger_columns(num_tokens: int) -> None:
    whole = rows("ab", "ab" + "C" * num_tokens, "xYZ")
    cut = {
        name: Ragged(getattr(whole, name).values, getattr(whole, name).offsets[1:3])
        for name in ("input_ids", "loss_mask", "logprobs", "rewards")
    }
    part = replace(take_rows(whole, [1]), **cut)

    alone = take_rows(whole, [1])
    assert_same((pad(part), jagged(part)), (pad(alone), jagged(alone)))
