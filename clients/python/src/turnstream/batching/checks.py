"""Whether rows agree with themselves, before anything is laid out.

Nothing is repaired here: a mask that is shorter than its response, shifted silently, would train
the wrong tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import BatchingError
from turnstream.types import Ragged, Rows

_PER_RESPONSE_TOKEN = ("loss_mask", "logprobs", "rewards", "advantages", "token_weights")
_DTYPES = {"loss_mask": np.dtype(np.uint8)}
_FLOAT32 = np.dtype(np.float32)


def response_lengths(rows: Rows) -> NDArray[np.int32]:
    """int32 (B,), response tokens of every row, by its tokens and its prompt."""
    return rows.input_ids.lengths - rows.prompt_length


def require_aligned(rows: Rows) -> None:
    """Refuse rows with anything but one value per response token, or a mask of other than 0 and 1.

    And columns of another type than `Rows` promises: layouts copy bits. And rows that train their
    first token, which no token before it scores.

    Raises:
        BatchingError: names the column, the row and both lengths.
    """
    if rows.advantage.dtype != _FLOAT32:
        raise BatchingError(f"advantage is {rows.advantage.dtype}, not float32")
    lengths_B = response_lengths(rows)
    if rows.prompt_length.min(initial=0) < 0 or lengths_B.min(initial=0) < 0:
        row = int(np.flatnonzero((rows.prompt_length < 0) | (lengths_B < 0))[0])
        raise BatchingError(
            f"prompt_length of row {rows.row_id[row]}: {rows.prompt_length[row]} of "
            f"{rows.input_ids.lengths[row]} tokens"
        )
    for name in _PER_RESPONSE_TOKEN:
        column: Ragged[np.generic] | None = getattr(rows, name)
        if column is None:
            continue
        dtype = _DTYPES.get(name, _FLOAT32)
        if column.values.dtype != dtype:
            raise BatchingError(f"{name} is {column.values.dtype}, not {dtype}")
        require_per_token(column, rows, name=name)
    if rows.loss_mask.values.max(initial=0) > 1:
        raise BatchingError(f"loss_mask: {rows.loss_mask.values.max()} is neither 0 nor 1")
    begins_B = rows.loss_mask.offsets[:-1]
    unscored = np.flatnonzero((rows.prompt_length == 0) & (lengths_B > 0))
    trained = unscored[rows.loss_mask.values[begins_B[unscored]] != 0]
    if len(trained):
        raise BatchingError(
            f"row {rows.row_id[trained[0]]} trains its first token, which no token before it "
            "scores: its prompt is empty"
        )


def require_per_token(values: Ragged[np.generic], rows: Rows, *, name: str) -> None:
    """Refuse a column with anything but one value per response token.

    Raises:
        BatchingError: names the column, the row and both lengths.
    """
    lengths_B = response_lengths(rows)
    found_B = values.lengths
    if len(found_B) != len(lengths_B):
        raise BatchingError(f"{name} has {len(found_B)} rows, the others have {len(lengths_B)}")
    if not np.array_equal(found_B, lengths_B):
        row = int(np.flatnonzero(found_B != lengths_B)[0])
        raise BatchingError(
            f"{name} of row {rows.row_id[row]}: {found_B[row]} values for "
            f"{lengths_B[row]} response tokens"
        )
