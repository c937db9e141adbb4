from __future__ import annotations

from dataclasses import replace

import numpy as np

from testkit import rows
from turnstream.batching.layouts.jagged import jagged
from turnstream.types import Ragged


def test_array_of_the_right_type_is_not_copied() -> None:
    batch = rows("abC", "aB")
    assert batch.logprobs is not None

    made = jagged(batch)

    assert made.logprobs_M is not None
    assert np.shares_memory(made.logprobs_M, batch.logprobs.values)
    assert np.shares_memory(made.loss_mask_M, batch.loss_mask.values)


def test_a_slice_of_a_larger_column_gets_offsets_from_0() -> None:
    whole = Ragged.from_rows([[1], [2, 3], [4]], np.int32)

    part = Ragged(whole.values, whole.offsets[1:]).flat()

    assert (part.values.tolist(), part.offsets.tolist()) == ([2, 3, 4], [0, 2, 3])


def test_rows_that_are_slices_are_laid_out_alone() -> None:
    batch = rows("xY", "abC")
    second = {
        name: Ragged(column.values, column.offsets[1:])
        for name in ("input_ids", "loss_mask", "logprobs", "rewards")
        if isinstance(column := getattr(batch, name), Ragged)
    }
    rest = {name: getattr(batch, name)[1:] for name in ("row_id", "prompt_length", "advantage")}

    made = jagged(replace(batch, **second, **rest))

    assert (made.input_ids_N.tolist(), made.offsets.tolist()) == ([97, 98, 99], [0, 3])
