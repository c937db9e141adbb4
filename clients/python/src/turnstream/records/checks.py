"""Whether the rows of a mini-batch agree with each other and with what is said of them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from turnstream.types import MiniBatch, MiniBatchInfo, Ragged, Rows

_TEXTS: Final = ("trajectory_id", "group_id", "prompt_uid", "status")
_DTYPES: Final = {
    "row_id": np.dtype(np.int64),
    "sample": np.dtype(np.int32),
    "attempt": np.dtype(np.int32),
    "sequence_index": np.dtype(np.int32),
    "is_last": np.dtype(np.bool_),
    "is_padding": np.dtype(np.bool_),
    "weight": np.dtype(np.float32),
    "reward": np.dtype(np.float32),
    "advantage": np.dtype(np.float32),
    "prompt_length": np.dtype(np.int32),
    "trajectory_num_tokens": np.dtype(np.int64),
    "group_num_tokens": np.dtype(np.int64),
    "input_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.uint8),
    "logprobs": np.dtype(np.float32),
    "rewards": np.dtype(np.float32),
    "run_versions": np.dtype(np.int64),
    "run_counts": np.dtype(np.int32),
}


def contradiction(mini_batch: MiniBatch) -> str:
    """The first thing that does not agree, in words; "" if all does."""
    rows, info = mini_batch.rows, mini_batch.info
    return (
        _of_columns(rows)
        or _of_lengths(rows)
        or _of_runs(rows)
        or _of_counts(rows, info)
        or _of_widths(rows, info)
    )


def _of_columns(rows: Rows) -> str:
    for name in Rows.__dataclass_fields__:
        column = getattr(rows, name)
        if column is None:
            continue
        if len(column) != len(rows):
            return f"{name} has {len(column)} rows of {len(rows)}"
        if name in _TEXTS:
            continue
        values: NDArray[Any] = getattr(column, "values", column)
        if values.dtype != _DTYPES[name]:
            return f"{name} is {values.dtype}, not {_DTYPES[name]}"
    return ""


def _of_lengths(rows: Rows) -> str:
    lengths_B = _response_lengths(rows)
    if np.any(rows.prompt_length < 0) or np.any(lengths_B < 0):
        return "prompt_length is not within its row"
    for name in ("loss_mask", "logprobs", "rewards"):
        column: Ragged[np.float32] | None = getattr(rows, name)
        if column is not None and not np.array_equal(column.lengths, lengths_B):
            return f"{name} has not one value per response token"
    return ""


def _of_runs(rows: Rows) -> str:
    if not np.array_equal(rows.run_versions.offsets, rows.run_counts.offsets):
        return "run_versions and run_counts have not the same lengths"
    ends = np.concatenate([[0], np.cumsum(rows.run_counts.values, dtype=np.int64)])
    covered_B = np.diff(ends[rows.run_counts.offsets])
    is_unknown_B = rows.run_counts.lengths == 0
    if not np.all(is_unknown_B | (covered_B == _response_lengths(rows))):
        return "version_runs do not cover the response"
    return ""


def _of_counts(rows: Rows, info: MiniBatchInfo) -> str:
    num_inert = int(np.count_nonzero(rows.is_padding))
    if (info.num_real_rows, info.num_inert_rows) != (len(rows) - num_inert, num_inert):
        return (
            f"{info.num_real_rows} real and {info.num_inert_rows} inert rows are said, "
            f"{len(rows) - num_inert} and {num_inert} are there"
        )
    positions = sorted(position for rows_of in info.micro_batches for position in rows_of)
    if info.micro_batches and positions != list(range(len(rows))):
        return f"the micro-batches hold {len(positions)} row positions for {len(rows)} rows"
    if not 0 <= info.mini_batch < info.num_mini_batches:
        return f"mini-batch {info.mini_batch} of {info.num_mini_batches}"
    if not 0 <= info.dp_rank < info.dp_world_size:
        return f"dp_rank {info.dp_rank} of {info.dp_world_size}"
    return ""


def _of_widths(rows: Rows, info: MiniBatchInfo) -> str:
    width = int(rows.input_ids.lengths.max(initial=0))
    response_width = int(_response_lengths(rows).max(initial=0))
    if width > info.width or response_width > info.response_width:
        return (
            f"width {info.width} and response_width {info.response_width} are said, "
            f"but a row has {width} tokens and a response {response_width}"
        )
    return ""


def _response_lengths(rows: Rows) -> NDArray[np.int32]:
    return rows.input_ids.lengths - rows.prompt_length
