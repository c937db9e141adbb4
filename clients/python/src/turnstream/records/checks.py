"""Checks of the rows of a mini-batch against each other and against the metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from turnstream.types import Extent, ExtraColumn, MiniBatch, MiniBatchInfo, Ragged, Rows

_TEXTS: Final = ("trajectory_id", "group_id", "prompt_uid", "status")
_DTYPES: Final = {
    name: np.dtype(kind)
    for kind, names in {
        np.int64: ("row_id", "trajectory_num_tokens", "group_num_tokens", "run_versions"),
        np.int32: (
            *("sample", "attempt", "sequence_index", "prompt_length", "input_ids", "run_counts"),
        ),
        np.bool_: ("is_last", "is_padding"),
        np.uint8: ("loss_mask",),
        np.float32: (
            *("weight", "reward", "advantage", "logprobs", "rewards", "advantages"),
            "token_weights",
        ),
    }.items()
    for name in names
}
_PER_RESPONSE_TOKEN: Final = ("loss_mask", "logprobs", "rewards", "advantages", "token_weights")
_EXTRA_DTYPES: Final = [
    *map(np.dtype, (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32)),
    *map(np.dtype, (np.uint64, np.int64, np.float16, np.float32, np.float64)),
]


def contradiction(mini_batch: MiniBatch) -> str:
    """Return the first contradiction, in words; "" if there is none."""
    rows, info = mini_batch.rows, mini_batch.info
    return (
        _of_columns(rows)
        or _of_lengths(rows)
        or _of_runs(rows)
        or _of_operations(rows)
        or _of_extras(rows)
        or _of_counts(rows, info)
        or _of_widths(rows, info)
    )


def _of_columns(rows: Rows) -> str:
    for name in Rows.__dataclass_fields__:
        column = getattr(rows, name)
        if column is None or name in ("operations", "extras"):
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
    for name in _PER_RESPONSE_TOKEN:
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


def _of_operations(rows: Rows) -> str:
    operations = rows.operations
    if operations is None:
        return ""
    ids, weights = operations.target_ids, operations.target_weights
    for name in ("request_id", "datum_index"):
        num_rows = len(getattr(operations, name))
        if num_rows != len(rows):
            return f"{name} has {num_rows} rows of {len(rows)}"
    for name, values, dtype in (
        ("datum_index", operations.datum_index, np.int32),
        ("target_ids", ids.values, np.int64),
        ("target_weights", weights.values, np.float32),
    ):
        if values.dtype != dtype:
            return f"{name} is {values.dtype}, not {np.dtype(dtype)}"
    for name, column in (("target_ids", ids), ("target_weights", weights)):
        if not np.array_equal(column.lengths, rows.input_ids.lengths):
            return f"{name} has not one value per token"
    shapes = ids.values.shape[1:], weights.values.shape[1:]
    if shapes[0] != shapes[1] or len(shapes[0]) > 1 or 0 in shapes[0]:
        return f"target_ids and target_weights have {shapes[0]} and {shapes[1]} values per token"
    return _of_operation_rows(rows, operations.request_id)


def _of_operation_rows(rows: Rows, request_id: Sequence[str]) -> str:
    for row in np.flatnonzero(~rows.is_padding).tolist():
        if not request_id[row]:
            return f"row {rows.row_id[row]} has no request_id, others have"
        if rows.prompt_length[row] or rows.trajectory_id[row]:
            return (
                f"row {rows.row_id[row]} of operation {request_id[row]!r} has a prompt of "
                f"{rows.prompt_length[row]} tokens and trajectory {rows.trajectory_id[row]!r}: "
                "it may have neither"
            )
    return ""


def _of_extras(rows: Rows) -> str:
    for name, column in rows.extras.items():
        wrong = _of_extra(column, rows=rows)
        if not (name.isascii() and name.isidentifier()):
            wrong = "is no name of letters, digits and underscores"
        if wrong:
            return f"extra column {name!r}: {wrong}"
    return ""


def _of_extra(column: ExtraColumn, *, rows: Rows) -> str:
    if column.per not in get_args(Extent):
        return f"one value per {column.per!r}, not per {' or '.join(get_args(Extent))}"
    if column.dtype not in _EXTRA_DTYPES:
        return f"{column.dtype} values"
    if 0 in column.shape:
        return f"values of shape {column.shape}"
    found_B = column.values.lengths
    if len(found_B) != len(rows):
        return f"{len(found_B)} rows of {len(rows)}"
    wrong_B = ~_is_legal(found_B, per=column.per, rows=rows)
    if wrong_B.any():
        row = int(np.flatnonzero(wrong_B)[0])
        return (
            f"{found_B[row]} values, one per {column.per}, for row {rows.row_id[row]} of "
            f"{rows.prompt_length[row]} + {rows.loss_mask.lengths[row]} tokens"
        )
    return ""


def _is_legal(num_values_B: NDArray[np.int32], *, per: Extent, rows: Rows) -> NDArray[np.bool_]:
    """Return whether each row (B,) may have so many values; an inert row may always have none."""
    num_tokens_B = rows.input_ids.lengths
    match per:
        case "token":
            legal_B = num_values_B == num_tokens_B
        case "first_tokens":
            legal_B = num_values_B <= num_tokens_B
        case "response_token":
            legal_B = num_values_B == _response_lengths(rows)
        case "row":
            legal_B = num_values_B == 1
        case "items":
            legal_B = num_values_B >= 0
    return legal_B | (rows.is_padding & (num_values_B == 0))


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
