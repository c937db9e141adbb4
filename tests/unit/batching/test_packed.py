from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from testkit import rows
from turnstream.batching.layouts.packed import Packed, line_up, packed, sequence_alignment
from turnstream.errors import BatchingError
from turnstream.types import Ragged, Rows

PAD = 7


def pack_all(batch: Rows, *, alignment: int = 1) -> Packed:
    bins = [list(range(len(batch)))]
    [only] = packed(batch, bins=bins, pad_token_id=PAD, alignment=alignment)
    return only


def test_bins_of_nothing_are_empty() -> None:
    assert packed(rows("aB"), bins=[], pad_token_id=0) == []
    [empty] = packed(rows("aB"), bins=[[]], pad_token_id=0)
    assert (empty.cu_seqlens.tolist(), empty.max_length) == ([0], 0)


def test_an_alignment_below_one_is_refused() -> None:
    with pytest.raises(BatchingError, match="alignment=0 must be at least 1"):
        pack_all(rows("aB"), alignment=0)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tensor_parallel": 1}, 1),
        ({"tensor_parallel": 4}, 4),
        ({"tensor_parallel": 2, "context_parallel": 2}, 8),
        ({"context_parallel": 2}, 4),
        ({"tensor_parallel": 2, "context_parallel": 2, "multiple_of": 32}, 32),
        ({"tensor_parallel": 3, "multiple_of": 16}, 48),
    ],
)
def test_the_alignment_is_what_parallel_ranks_cut_a_row_into(
    sizes: dict[str, int], expected: int
) -> None:
    assert sequence_alignment(**sizes) == expected


def test_more_slots_than_int32_counts_are_refused() -> None:
    batch = rows("aB", "aB")
    offsets = np.array([0, 2**30, 2**31 - 1], np.int32)  # their tokens are not read
    wide = replace(batch, input_ids=Ragged(batch.input_ids.values, offsets))

    with pytest.raises(BatchingError, match="slots in one bin: cu_seqlens are int32"):
        line_up(wide, bins=[[0, 1, 0]], alignment=1)
    order, _, starts = line_up(wide, bins=[[0], [1]], alignment=1)

    assert (order.tolist(), starts.tolist()) == ([0, 1], [0, 2**30, 2**31 - 1])
