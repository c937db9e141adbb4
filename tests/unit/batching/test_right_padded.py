from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from testkit import rows
from turnstream.batching.layouts.padded import RightPadded, right_padded
from turnstream.errors import RowTooLongError
from turnstream.types import Rows

PAD = 7


def pad(batch: Rows, *, width: int | None = None) -> RightPadded:
    longest = int(batch.input_ids.lengths.max(initial=0))
    return right_padded(batch, width=longest if width is None else width, pad_token_id=PAD)


def test_case_9_row_longer_than_the_width_is_refused() -> None:
    # The reference is as wide as its longest row, and above its limit warns once; nothing is cut.
    assert pad(rows("abcD"), width=4).input_ids_BT.shape == (1, 4)
    with pytest.raises(RowTooLongError) as caught:
        pad(rows("aB", "abcdE"), width=4)
    assert caught.value.args == (1, 5, 4)


def test_a_mask_counts_its_columns_also_beyond_int16() -> None:
    batch = replace(rows("|" + "a" * 32_768, "ab|"), logprobs=None)

    padded = pad(batch)

    assert padded.attention_mask_BT.shape == (2, 32_768)
    assert np.count_nonzero(padded.attention_mask_BT, axis=1).tolist() == [32_768, 2]
