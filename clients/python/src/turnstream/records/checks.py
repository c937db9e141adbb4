"""Checks of the rows of a mini-batch against each other and against the metadata."""

from __future__ import annotations

from typing import Any, Final, cast, get_args

import numpy as np
from numpy.typing import NDArray

from turnstream.types import Extent, ExtraColumn, MiniBatch, MiniBatchInfo, Ragged, Rows
from turnstream.types.extras import EXTRA_DTYPES, ROUTE_DTYPES, num_values

ROW_COLUMNS: Final = {
    "row_id": "int64",
    "trajectory_id": "text",
    "group_id": "text",
    "prompt_uid": "text",
    "sample": "int32",
    "attempt": "int32",
    "sequence_index": "int32",
    "is_last": "bool",
    "is_padding": "bool",
    "status": "text",
    "weight": "float32",
    "reward": "float32",
    "prompt_length": "int32",
    "trajectory_num_tokens": "int64",
    "group_num_tokens": "int64",
    "input_ids": "lists of int32",
    "loss_mask": "lists of uint8",
    "logprobs": "lists of float32",
    "rewards": "lists of float32",
    "run_versions": "lists of int64",
    "run_counts": "lists of int32",
    "advantage": "float32",
    "advantages": "lists of float32",
    "token_weights": "lists of float32",
}
"""Kind of every column of `Rows`, in the order in which they travel."""

OPERATION_COLUMNS: Final = {
    "request_id": "text",
    "datum_index": "int32",
    "target_ids": "lists of int64",
    "target_weights": "lists of float32",
    "ratio_mask": "lists of float32",
}

_PER_RESPONSE_TOKEN: Final = ("loss_mask", "logprobs", "rewards", "advantages", "token_weights")


def contradiction(mini_batch: MiniBatch) -> str:
    """Return the first contradiction, in words; "" if there is none."""
    rows, info = mini_batch.rows, mini_batch.info
    return (
        _of_columns(rows, ROW_COLUMNS, num_rows=len(rows))
        or _of_lengths(rows)
        or _of_runs(rows)
        or _of_operations(rows)
        or _of_extras(rows)
        or _of_counts(rows, info)
        or _of_widths(rows, info)
    )


def _of_columns(values: object, kinds: dict[str, str], *, num_rows: int) -> str:
    for name, kind in kinds.items():
        column = getattr(values, name)
        if column is None:
            continue
        found = _kind_of(column)
        # Targets may have several values per token.
        if found != kind and not (name.startswith("target_") and found.startswith(f"{kind}[")):
            return f"{name} is {found}, not {kind}"
        if len(column) != num_rows:
            return f"{name} has {len(column)} rows of {num_rows}"
    return ""


def _kind_of(column: Any) -> str:
    if isinstance(column, Ragged):
        return f"lists of {_kind_of(cast('Ragged[Any]', column).values)}"
    if isinstance(column, np.ndarray):
        array = cast("NDArray[Any]", column)
        return f"{array.dtype}{list(array.shape[1:]) if array.ndim > 1 else ''}"
    return "text"


def _of_lengths(rows: Rows) -> str:
    lengths_B = rows.response_lengths
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
    if not np.all(is_unknown_B | (covered_B == rows.response_lengths)):
        return "version_runs do not cover the response"
    return ""


def _of_operations(rows: Rows) -> str:
    operations = rows.operations
    if operations is None:
        return ""
    if wrong := _of_columns(operations, OPERATION_COLUMNS, num_rows=len(rows)):
        return wrong
    ids, weights = operations.target_ids, operations.target_weights
    columns = {"target_ids": ids, "target_weights": weights, "ratio_mask": operations.ratio_mask}
    for name, column in columns.items():
        if column is not None and not np.array_equal(column.lengths, rows.input_ids.lengths):
            return f"{name} has not one value per token"
    shapes = ids.values.shape[1:], weights.values.shape[1:]
    if shapes[0] != shapes[1] or len(shapes[0]) > 1 or 0 in shapes[0]:
        return f"target_ids and target_weights have {shapes[0]} and {shapes[1]} values per token"
    for row in np.flatnonzero(~rows.is_padding).tolist():
        request_id = operations.request_id[row]
        if not request_id:
            return f"row {rows.row_id[row]} has no request_id, others have"
        if rows.prompt_length[row] or rows.trajectory_id[row]:
            return (
                f"row {rows.row_id[row]} of operation {request_id!r} has a prompt of "
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
    per, kind = column.per, _kind_of(column.values)
    if per not in get_args(Extent):
        return f"one value per {per!r}, not per {' or '.join(get_args(Extent))}"
    is_route = per == "first_tokens"
    if not kind.startswith("lists of") or str(column.dtype) not in (
        ROUTE_DTYPES if is_route else EXTRA_DTYPES
    ):
        return f"{kind} values"
    if 0 in column.shape or (is_route and len(column.shape) != 2):
        return f"values of shape {column.shape}"
    found_B = column.values.lengths
    if len(found_B) != len(rows):
        return f"{len(found_B)} rows of {len(rows)}"
    num_tokens_B, num_response_B = rows.input_ids.lengths, rows.loss_mask.lengths
    expected = num_values(per, num_tokens=num_tokens_B, num_response=num_response_B)
    if expected is None:
        is_wrong_B = found_B > num_tokens_B if is_route else np.zeros(len(rows), np.bool_)
    else:
        is_wrong_B = found_B != expected
    if is_wrong_B.any():
        row = int(np.flatnonzero(is_wrong_B)[0])
        return (
            f"{found_B[row]} values, one per {per}, for row {rows.row_id[row]} of "
            f"{rows.prompt_length[row]} + {num_response_B[row]} tokens"
        )
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
    width = rows.input_ids.lengths.max(initial=0)
    response_width = rows.response_lengths.max(initial=0)
    if width > info.width or response_width > info.response_width:
        return (
            f"width {info.width} and response_width {info.response_width} are said, "
            f"but a row has {width} tokens and a response {response_width}"
        )
    return ""
