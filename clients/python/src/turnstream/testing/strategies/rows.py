"""What workers train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from turnstream.testing.batches import mini_batch_info
from turnstream.testing.strategies.turns import version_runs
from turnstream.testing.strategies.values import (
    exactly,
    floats,
    floats32,
    logprobs_of_tokens,
    masks,
    names,
    optional_versions,
    tokens,
)
from turnstream.types import MiniBatch, Ragged, Rows


@st.composite
def mini_batches(draw: st.DrawFn) -> MiniBatch:
    """Any share of a mini-batch: with inert rows, rewards missing, logprobs missing in part."""
    rows = _rows(draw, prompts=draw(st.lists(tokens(), max_size=4)))
    order = draw(st.permutations(range(len(rows))))
    cut = draw(st.integers(0, len(rows)))
    info = mini_batch_info(
        rows,
        run=draw(names),
        oldest_version=draw(optional_versions),
        padding_share=draw(st.floats(0, 1)),
        pad_token_id=draw(st.integers(0, 200_000)),
        micro_batches=(tuple(order[:cut]), tuple(order[cut:])),
    )
    return MiniBatch(rows=rows, info=info)


@st.composite
def scored_rows(draw: st.DrawFn) -> Rows:
    """Rows that every layout takes: ids as they are given, and no first token is trained.

    Prompts and responses may be empty, inert rows stand anywhere.
    """
    rows = draw(mini_batches()).rows
    mask = rows.loss_mask.values.copy()
    is_unscored = (rows.prompt_length == 0) & (rows.loss_mask.lengths > 0)
    mask[rows.loss_mask.offsets[:-1][is_unscored]] = 0
    mask[np.repeat(rows.is_padding, rows.loss_mask.lengths)] = 0
    numbers = np.arange(len(rows), dtype=np.int64)
    return replace(
        rows,
        row_id=np.where(rows.is_padding, -1 - numbers, numbers),
        loss_mask=Ragged(mask, rows.loss_mask.offsets),
    )


def _rows(draw: st.DrawFn, *, prompts: Sequence[NDArray[np.int32]]) -> Rows:

    def column(values: st.SearchStrategy[Any], dtype: type[np.generic]) -> NDArray[Any]:
        return np.array(draw(exactly(len(prompts), values)), dtype)

    texts = exactly(len(prompts), st.text(max_size=4))
    responses = [draw(tokens()) for _ in prompts]
    counts = [len(response) for response in responses]
    runs = [draw(version_runs(count)) for count in counts]
    run_versions = [[-1 if v is None else v for v, _ in row] for row in runs]
    both = zip(prompts, responses, strict=True)
    logprobs = [draw(floats(count, logprobs_of_tokens | st.just(np.nan))) for count in counts]
    return Rows(
        **{name: draw(texts) for name in ("trajectory_id", "group_id", "prompt_uid", "status")},
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
