"""Rows and mini-batches of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from testkit.batches import mini_batch_info
from testkit.strategies.turns import version_runs
from testkit.strategies.values import (
    exactly,
    figures,
    floats,
    floats32,
    logprobs_of_tokens,
    masks,
    names,
    optional_versions,
    tokens,
)
from turnstream.types import (
    Aggregation,
    Extent,
    ExtraColumn,
    MiniBatch,
    OperationColumns,
    Ragged,
    Rows,
)


@st.composite
def mini_batches(draw: st.DrawFn) -> MiniBatch:
    """Any share of a mini-batch: with inert rows, rewards missing, logprobs missing in part.

    With and without advantages and weights per token, and extra columns.
    """
    rows = _rows(draw, prompts=draw(st.lists(tokens(), max_size=4)))
    per_token = floats(len(rows.loss_mask.values), floats32)
    return _mini_batch(
        draw,
        replace(
            rows,
            advantages=draw(st.none() | per_token.map(_like(rows.loss_mask))),
            token_weights=draw(st.none() | per_token.map(_like(rows.loss_mask))),
            extras=draw(extra_columns(rows)),
        ),
    )


@st.composite
def operation_mini_batches(draw: st.DrawFn) -> MiniBatch:
    """Rows of operations: all positions, one target or K of them per token, and inert rows."""
    rows = _rows(draw, prompts=[np.zeros(0, np.int32)] * draw(st.integers(0, 4)))
    shape = draw(st.sampled_from([(), (1,), (3,)]))
    num_targets = len(rows.input_ids.values) * int(np.prod(shape, dtype=np.int64))
    ids = draw(exactly(num_targets, st.integers(-(2**63), 2**63 - 1)))
    weights = draw(floats(num_targets, floats32))
    is_real = (~rows.is_padding).tolist()
    offsets = rows.input_ids.offsets
    ratio_mask = Ragged(draw(floats(len(rows.input_ids.values), floats32)), offsets)
    operations = OperationColumns(
        request_id=[draw(names) if real else "" for real in is_real],
        datum_index=np.array(draw(exactly(len(rows), st.integers(0, 9))), np.int32),
        target_ids=Ragged(np.array(ids, np.int64).reshape(-1, *shape), offsets),
        target_weights=Ragged(weights.reshape(-1, *shape), offsets),
        ratio_mask=draw(st.sampled_from([None, ratio_mask])),
    )
    no_names = [""] * len(rows)
    return _mini_batch(draw, replace(rows, trajectory_id=no_names, operations=operations))


@st.composite
def extra_columns(draw: st.DrawFn, rows: Rows) -> dict[str, ExtraColumn]:
    """Declared columns of any extent, dtype and shape."""
    columns: dict[str, ExtraColumn] = {}
    for name in sorted(draw(st.sets(st.sampled_from(["routes", "images", "teacher"])))):
        extent: Extent = draw(st.sampled_from(get_args(Extent)))
        is_route = extent == "first_tokens"
        shape = draw(st.sampled_from([(1, 2), (2, 3)] if is_route else [(), (2,), (2, 3)]))
        dtypes = [np.uint8, np.int16, np.int32, *([] if is_route else [np.float16, np.float32])]
        dtype = draw(st.sampled_from(dtypes))
        lengths = [draw(_num_values(extent, rows=rows, row=row)) for row in range(len(rows))]
        offsets = np.cumsum([0, *lengths]).astype(np.int32)
        count = int(offsets[-1]) * int(np.prod(shape, dtype=np.int64))
        values = np.array(draw(exactly(count, st.integers(0, 99))), dtype)
        columns[name] = ExtraColumn(per=extent, values=Ragged(values.reshape(-1, *shape), offsets))
    return columns


def _num_values(extent: Extent, *, rows: Rows, row: int) -> st.SearchStrategy[int]:
    num_tokens = int(rows.input_ids.lengths[row])
    counts: dict[Extent, st.SearchStrategy[int]] = {
        "token": st.just(num_tokens),
        "first_tokens": st.integers(0, num_tokens),
        "response_token": st.just(int(rows.loss_mask.lengths[row])),
        "row": st.just(1),
        "items": st.integers(0, 3),
    }
    return counts[extent]


def _like(column: Ragged[Any]) -> Callable[[NDArray[np.float32]], Ragged[np.float32]]:
    return lambda values: Ragged(values, column.offsets)


def _mini_batch(draw: st.DrawFn, rows: Rows) -> MiniBatch:
    order = draw(st.permutations(range(len(rows))))
    cut = draw(st.integers(0, len(rows)))
    info = mini_batch_info(
        rows,
        run=draw(names),
        oldest_version=draw(optional_versions),
        padding_share=draw(st.floats(0, 1)),
        figures=draw(figures),
        aggregation=draw(st.sampled_from([None, *get_args(Aggregation)])),
        pad_token_id=draw(st.integers(0, 200_000)),
        alignment=draw(st.integers(1, 256)),
        micro_batches=(tuple(order[:cut]), tuple(order[cut:])),
    )
    return MiniBatch(rows=rows, info=info)


@st.composite
def scored_rows(draw: st.DrawFn) -> Rows:
    """Rows that every layout takes: ids as they are given, and no first token is trained.

    Prompts and responses may be empty, inert rows stand anywhere. Advantages are per row or per
    token, with and without weights of tokens.
    """
    rows = _rows(draw, prompts=draw(st.lists(tokens(), max_size=4)))
    mask = rows.loss_mask.values.copy()
    is_unscored = (rows.prompt_length == 0) & (rows.loss_mask.lengths > 0)
    mask[rows.loss_mask.offsets[:-1][is_unscored]] = 0
    mask[np.repeat(rows.is_padding, rows.loss_mask.lengths)] = 0
    numbers = np.arange(len(rows), dtype=np.int64)
    per_token = st.none() | floats(len(mask), floats32).map(_like(rows.loss_mask))
    return replace(
        rows,
        advantages=draw(per_token),
        token_weights=draw(per_token),
        row_id=np.where(rows.is_padding, -1 - numbers, numbers),
        loss_mask=Ragged(mask, rows.loss_mask.offsets),
    )


def _rows(draw: st.DrawFn, *, prompts: Sequence[NDArray[np.int32]]) -> Rows:
    def column(values: st.SearchStrategy[Any], dtype: type[np.generic]) -> NDArray[Any]:
        return np.array(draw(exactly(len(prompts), values)), dtype)

    texts: dict[str, Any] = {
        name: draw(exactly(len(prompts), st.text(max_size=4)))
        for name in ("trajectory_id", "group_id", "prompt_uid", "status")
    }
    responses = [draw(tokens()) for _ in prompts]
    counts = [len(response) for response in responses]
    runs = [draw(version_runs(count)) for count in counts]
    run_versions = [[-1 if v is None else v for v, _ in row] for row in runs]
    both = zip(prompts, responses, strict=True)
    logprobs = [draw(floats(count, logprobs_of_tokens | st.just(np.nan))) for count in counts]
    return Rows(
        **texts,
        row_id=column(st.integers(-(2**63), 2**63 - 1), np.int64),
        sample=column(st.integers(0, 2**31 - 1), np.int32),
        attempt=column(st.integers(0, 9), np.int32),
        sequence_index=column(st.integers(0, 9), np.int32),
        is_last=column(st.booleans(), np.bool_),
        is_padding=column(st.booleans(), np.bool_),
        weight=column(floats32, np.float32),
        reward=column(floats32 | st.just(np.nan), np.float32),
        advantage=column(floats32, np.float32),
        prompt_length=np.array([len(prompt) for prompt in prompts], np.int32),
        trajectory_num_tokens=column(st.integers(0, 2**40), np.int64),
        group_num_tokens=column(st.integers(0, 2**40), np.int64),
        input_ids=Ragged.from_rows([np.concatenate(parts) for parts in both], np.int32),
        loss_mask=Ragged.from_rows([draw(masks(count)) for count in counts], np.uint8),
        logprobs=Ragged.from_rows(logprobs, np.float32) if draw(st.booleans()) else None,
        rewards=Ragged.from_rows([draw(floats(n, floats32)) for n in counts], np.float32),
        run_versions=Ragged.from_rows(run_versions, np.int64),
        run_counts=Ragged.from_rows([[run.num_tokens for run in row] for row in runs], np.int32),
    )
