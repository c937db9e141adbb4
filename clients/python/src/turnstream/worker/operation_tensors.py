"""Mini-batches of Tinker-style operations as torch tensors, one after another without padding.

    for part in operation_tensors(mini_batch):
        logits_NV = model(part.input_ids_N, part.position_ids_N, part.bounds)
        current_NK = target_logprobs(logits_NV, targets_NK=part.target_ids_NK)
        loss_N = operation_loss(current_NK, part, loss="ppo")
        loss_N.sum().backward()

Shapes: N positions of all rows of a forward pass, B rows, K targets of a position, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnstream.batching.rows.assemble import take_rows
from turnstream.errors import BatchingError
from turnstream.types import MiniBatch, Ragged, Rows
from turnstream.worker.tensors import as_tensor, moved_tensors, on_cpu, row_sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperationTensors:
    """The rows of one forward pass.

    Attributes:
        row_ids: B permanent names, negative for inert rows; on the host.
        bounds: B + 1 positions on the host: row b has those from `bounds[b]` to `bounds[b + 1]`.
        num_targets: K where targets have a dimension of their own; None if a position has one.
        input_ids_N: int64.
        position_ids_N: int64, 0 at the first position of every row.
        row_of_N: int64, the row of each position.
        target_ids_NK: int64. The logits of a position score its targets, without a shift.
        weights_NK: float32, of any sign; 0 in inert rows.
        logprobs_N: float32, of sampling, in nats; None if the loss reads none.
        advantages_N: float32; None if the loss reads none.
        ratio_mask_N: bool, the positions of the mean ratio of gspo; None for other losses.
    """

    row_ids: tuple[int, ...]
    bounds: tuple[int, ...]
    num_targets: int | None
    input_ids_N: Tensor
    position_ids_N: Tensor
    row_of_N: Tensor
    target_ids_NK: Tensor
    weights_NK: Tensor
    logprobs_N: Tensor | None
    advantages_N: Tensor | None
    ratio_mask_N: Tensor | None

    def row_sums(self, values_N: Tensor) -> dict[int, float]:
        """Return the sum of every real row, by row id."""
        sums_B = row_sums(values_N.detach(), rows=self.row_of_N, num_rows=len(self.row_ids))
        named = zip(self.row_ids, sums_B.tolist(), strict=True)
        return {row_id: value for row_id, value in named if row_id >= 0}

    def target_values(self, values_NK: Tensor) -> dict[int, NDArray[Any]]:
        """Return the values of every real row, shaped as its targets, by row id, on the CPU."""
        values = on_cpu(values_NK)
        if self.num_targets is None:
            values = values[:, 0]
        parts = np.split(values, self.bounds[1:-1])
        named = zip(self.row_ids, parts, strict=True)
        return {row_id: part for row_id, part in named if row_id >= 0}


def operation_tensors(
    mini_batch: MiniBatch, *, device: torch.device | str | None = None
) -> list[OperationTensors]:
    """Return one value per forward pass of the plan, on the CPU or copied to `device`."""
    passes = mini_batch.info.micro_batches
    parts = [_tensors(take_rows(mini_batch.rows, rows)) for rows in passes]
    return [moved_tensors(part, device) for part in parts]


def _tensors(rows: Rows) -> OperationTensors:
    operations = rows.operations
    if operations is None:
        raise BatchingError("the rows of this mini-batch are not those of operations")
    offsets = rows.input_ids.offsets
    row_of_N: NDArray[np.int64] = np.repeat(np.arange(len(rows)), rows.input_ids.lengths)
    position_ids_N = np.arange(len(row_of_N)) - offsets[row_of_N]
    is_response_N = position_ids_N >= rows.prompt_length[row_of_N]

    def scored(column: Ragged[np.float32] | None) -> Tensor | None:
        if column is None:
            return None
        values_N: NDArray[np.float32] = np.zeros(len(row_of_N), np.float32)
        values_N[is_response_N] = column.flat().values
        return as_tensor(values_N)

    targets = operations.target_ids.flat().values
    weights = operations.target_weights.flat().values
    ratio_mask = operations.ratio_mask
    return OperationTensors(
        row_ids=tuple(rows.row_id.tolist()),
        bounds=tuple(offsets.tolist()),
        num_targets=targets.shape[1] if targets.ndim > 1 else None,
        input_ids_N=as_tensor(rows.input_ids.values.astype(np.int64)),
        position_ids_N=as_tensor(position_ids_N),
        row_of_N=as_tensor(row_of_N),
        target_ids_NK=as_tensor(targets.reshape(len(row_of_N), -1)),
        weights_NK=as_tensor(weights.reshape(len(row_of_N), -1)),
        logprobs_N=scored(rows.logprobs),
        advantages_N=scored(rows.advantages),
        ratio_mask_N=None if ratio_mask is None else as_tensor(ratio_mask.flat().values > 0),
    )
