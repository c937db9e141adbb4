from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from testkit import assert_same, rows
from turnstream.batching.layouts.padded import LeftPadded, left_padded, left_padded_column
from turnstream.batching.rows.assemble import take_rows
from turnstream.errors import RowTooLongError
from turnstream.types import Ragged, Rows

PAD = 7


def pad(batch: Rows, *, width: int | None = None, response_width: int | None = None) -> LeftPadded:
    return left_padded(
        batch,
        width=int(batch.input_ids.lengths.max(initial=0)) if width is None else width,
        response_width=int(batch.loss_mask.lengths.max(initial=0))
        if response_width is None
        else response_width,
        pad_token_id=PAD,
    )


def numbered(*parts: tuple[list[int], list[int]]) -> Rows:
    """Rows of these prompts and responses; every response token is trained."""
    texts = ["a" * len(prompt) + "|" + "B" * len(response) for prompt, response in parts]
    ids = Ragged.from_rows([prompt + response for prompt, response in parts], np.int32)
    return replace(rows(*texts), input_ids=ids)


def test_case_1_rows_end_in_the_last_column() -> None:
    batch = replace(
        numbered(([1, 2, 3], [5]), ([4], [6, 7, 8])),
        rewards=Ragged.from_rows([[1], [0, 0, 0.5]], np.float32),
        loss_mask=Ragged.from_rows([[1], [1, 0, 1]], np.uint8),
    )

    padded = pad(batch)

    assert padded.input_ids_BT.tolist() == [[1, 2, 3, 5], [4, 6, 7, 8]]
    assert padded.attention_mask_BT.all()
    assert padded.response_mask_BR.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert padded.rewards_BR.tolist() == [[0, 0, 1], [0, 0, 0.5]]
    assert padded.loss_mask_BR.tolist() == [[0, 0, 1], [1, 0, 1]]


def test_case_7_logprobs_are_zero_left_of_the_response() -> None:
    batch = rows("x|AB", "x|C")

    assert pad(replace(batch, logprobs=None)).logprobs_BR is None
    logprobs_BR = pad(batch).logprobs_BR
    assert logprobs_BR is not None
    assert logprobs_BR.tolist() == [[-0.5, -0.5], [0, -0.5]]


def test_positions_count_from_the_first_real_token() -> None:
    padded = pad(rows("ab|C", "|d"))

    assert padded.position_ids_BT.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert padded.position_ids_BT.dtype == np.int64


def test_case_9_row_longer_than_the_width_is_refused() -> None:
    # The reference is as wide as its longest row, and above its limit warns once; nothing is cut.
    batch = rows("ab|CD", "abc|D")

    assert pad(batch, width=4).input_ids_BT.shape == (2, 4)
    with pytest.raises(RowTooLongError) as caught:
        pad(rows("a|B", "abcd|E"), width=4)
    assert caught.value.args == (1, 5, 4)


def test_a_response_longer_than_its_width_is_refused() -> None:
    with pytest.raises(RowTooLongError) as caught:
        pad(rows("ab|C", "a|BC"), response_width=1)

    assert caught.value.args == (1, 2, 1)


@pytest.mark.parametrize("width", [32_767, 32_768, 40_000])
def test_a_mask_counts_its_columns_also_beyond_int16(width: int) -> None:
    padded = pad(rows("a|B", "|"), width=width, response_width=width)

    assert np.argwhere(padded.attention_mask_BT).tolist() == [[0, width - 2], [0, width - 1]]
    assert np.argwhere(padded.response_mask_BR).tolist() == [[0, width - 1]]
    assert padded.position_ids_BT[0, -2:].tolist() == [0, 1]


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

    found = pad(part)

    assert_same(found, pad(take_rows(whole, [1])))
