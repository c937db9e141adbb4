"""Builders of what workers train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testkit.letters import ids, mask
from turnstream.batching.merge.plan import PLAIN_ASSEMBLY_VERSION
from turnstream.types import (
    Denominators,
    Extent,
    ExtraColumn,
    MiniBatch,
    MiniBatchInfo,
    OperationColumns,
    Ragged,
    Rows,
)


def rows(
    *texts: str,
    group_ids: Sequence[str] | None = None,
    rewards: Sequence[float] | None = None,
    advantages: Sequence[float] | None = None,
    logprobs: float | None = -0.5,
    token_reward: float = 0.0,
    version: int = 0,
    first_row_id: int = 0,
    is_padding: Sequence[bool] | None = None,
    extras: Mapping[str, ExtraColumn] | None = None,
) -> Rows:
    """Rows from letters: prompt, then the response, which begins at "|" or at the first capital.

    Every row is a trajectory of its own. `rows("abCdE", "a|bC")` has a prompt "ab" and an observed
    token "d" in the first row, and a response that begins with an observed token in the second.
    `logprobs` and `token_reward` stand at the trained tokens, with 0.0 elsewhere; without logprobs
    the column is left out.
    """
    num_rows = len(texts)
    prompts, responses = zip(*map(_cut, texts), strict=True) if texts else ((), ())
    groups = list(group_ids or ["g0"] * num_rows)
    masks = [mask(response) for response in responses]
    trained = np.array([int(loss_mask.sum()) for loss_mask in masks], np.int64)
    inert = np.array(is_padding or [False] * num_rows, np.bool_)
    runs = [_runs(loss_mask.tolist(), version=version) for loss_mask in masks]
    return Rows(
        row_id=np.where(inert, -1 - np.arange(num_rows), first_row_id + np.arange(num_rows)),
        trajectory_id=["" if inert[b] else f"{groups[b]}/{b}/0" for b in range(num_rows)],
        group_id=["" if inert[b] else groups[b] for b in range(num_rows)],
        prompt_uid=[""] * num_rows,
        status=["" if inert[b] else "completed" for b in range(num_rows)],
        sample=np.arange(num_rows, dtype=np.int32),
        attempt=np.zeros(num_rows, np.int32),
        sequence_index=np.zeros(num_rows, np.int32),
        is_last=np.ones(num_rows, np.bool_),
        is_padding=inert,
        weight=np.where(inert, 0, 1).astype(np.float32),
        reward=np.where(inert, np.nan, rewards or [1.0] * num_rows).astype(np.float32),
        advantage=np.array(advantages or [0.0] * num_rows, np.float32),
        prompt_length=np.array([len(prompt) for prompt in prompts], np.int32),
        trajectory_num_tokens=trained,
        group_num_tokens=_group_sums(groups, trained),
        input_ids=Ragged.from_rows([ids(text.replace("|", "")) for text in texts], np.int32),
        loss_mask=Ragged.from_rows(masks, np.uint8),
        logprobs=_logprobs(logprobs, masks=masks),
        rewards=Ragged.from_rows([m * token_reward for m in masks], np.float32),
        run_versions=Ragged.from_rows([[run[0] for run in row] for row in runs], np.int64),
        run_counts=Ragged.from_rows([[run[1] for run in row] for row in runs], np.int32),
        extras=dict(extras or {}),
    )


def operation_rows(
    *texts: str,
    request_id: str = "model:1",
    num_targets: int | None = None,
    first_row_id: int = 0,
    is_padding: Sequence[bool] | None = None,
) -> Rows:
    """Rows of one operation from letters: every token is its own target, a capital with weight 1.

    `num_targets` is K, targets per token, all the same; None is one number and not a list of one.
    """
    num_rows = len(texts)
    inert = list(is_padding or [False] * num_rows)
    cut = [text if "|" in text else f"|{text}" for text in texts]
    built = rows(*cut, first_row_id=first_row_id, is_padding=inert)
    letters = [text.replace("|", "") for text in texts]
    targets: list[Any] = [ids(text) for text in letters]
    weights: list[Any] = [mask(text) for text in letters]
    if num_targets is not None:
        targets = [np.stack([row] * num_targets, axis=1) for row in targets]
        weights = [np.stack([row] * num_targets, axis=1) for row in weights]
    operations = OperationColumns(
        request_id=["" if row_is_inert else request_id for row_is_inert in inert],
        datum_index=np.arange(first_row_id, first_row_id + num_rows, dtype=np.int32),
        target_ids=Ragged.from_rows(targets, np.int64),
        target_weights=Ragged.from_rows(weights, np.float32),
    )
    none = [""] * num_rows
    return replace(built, trajectory_id=none, group_id=none, status=none, operations=operations)


def extra_column(per: Extent, values: NDArray[Any], offsets: Sequence[int]) -> ExtraColumn:
    """A declared column: row b has the values from `offsets[b]` to `offsets[b + 1]`."""
    return ExtraColumn(per=per, values=Ragged(values, np.array(offsets, np.int32)))


def mini_batch_info(of: Rows, **changes: Any) -> MiniBatchInfo:
    """Return the metadata of a batch with these rows alone; `changes` replace fields."""
    info = MiniBatchInfo(
        run="run",
        step=1,
        revision=0,
        lineage="main",
        mini_batch=0,
        num_mini_batches=1,
        manifest_hash="0" * 64,
        assembly_version=PLAIN_ASSEMBLY_VERSION,
        config_revision=1,
        pad_token_id=0,
        width=int(of.input_ids.lengths.max(initial=0)),
        response_width=int(of.loss_mask.lengths.max(initial=0)),
        denominators=_denominators(of),
        padding_share=0.0,
        merge_ratio=1.0,
        oldest_version=0,
        newest_version=0,
        dp_rank=0,
        dp_world_size=1,
        num_real_rows=int(np.count_nonzero(~of.is_padding)),
        num_inert_rows=int(np.count_nonzero(of.is_padding)),
        micro_batches=(tuple(range(len(of))),),
    )
    return replace(info, **changes)


def mini_batch(*texts: str, **changes: Any) -> MiniBatch:
    """A mini-batch of `rows(*texts)`; `changes` replace fields of its info."""
    built = rows(*texts or ("abCD", "abcE"))
    return MiniBatch(rows=built, info=mini_batch_info(built, **changes))


def _denominators(of: Rows) -> Denominators:
    trained = np.array([int(row.sum()) for row in of.loss_mask], np.int64)
    counted = [row for row in range(len(of)) if trained[row] and not of.is_padding[row]]
    return Denominators(
        num_tokens=int(trained[counted].sum()),
        num_sequences=len(counted),
        num_trajectories=len({of.trajectory_id[row] for row in counted}),
        num_groups=len({of.group_id[row] for row in counted}),
        weight_sum=float(of.weight[counted].sum()),
        length_constant=0,
    )


def _group_sums(groups: Sequence[str], trained: NDArray[np.int64]) -> NDArray[np.int64]:
    sums = dict.fromkeys(groups, 0)
    for name, num_tokens in zip(groups, trained.tolist(), strict=True):
        sums[name] += num_tokens
    return np.array([sums[name] for name in groups], np.int64)


def _cut(text: str) -> tuple[str, str]:
    if "|" in text:
        prompt, _, response = text.partition("|")
        return prompt, response
    capitals = [position for position, letter in enumerate(text) if letter.isupper()]
    start = capitals[0] if capitals else len(text)
    return text[:start], text[start:]


def _logprobs(value: float | None, *, masks: Sequence[Any]) -> Ragged[np.float32] | None:
    if value is None:
        return None
    return Ragged.from_rows([np.where(loss_mask, value, 0.0) for loss_mask in masks], np.float32)


def _runs(loss_mask: Sequence[int], *, version: int) -> list[tuple[int, int]]:
    """Runs of (version, count): trained tokens were sampled by `version`, the others observed."""
    runs: list[tuple[int, int]] = []
    for trained in loss_mask:
        name = version if trained else -1
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    return runs
