"""Mini-batches as torch tensors in the layouts without left padding.

    for part in packed_to_torch(mini_batch):
        logits_NV = model(part.input_ids_N, part.position_ids_N, part.cu_seqlens, part.max_length)
        current_N = next_token_logprobs(logits_NV, input_ids=part.input_ids_N)
        loss_N = ppo_clip(current_N, old_BR=old_N, advantages_BR=part.advantages_N, ...)
        aggregate(loss_N, part).backward()

Losses that look at one token at a time take tensors of any of these shapes. Those with a ratio per
row (GSPO, sequence and geometric corrections) also need `row_of=part.row_of` for flat tensors.

Shapes: B rows, T columns, N slots of a bin or tokens of all rows, M response tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnstream.batching.layouts.jagged import Jagged, jagged
from turnstream.batching.layouts.outputs import (
    ResponseValues,
    response_values_jagged,
    response_values_packed,
    response_values_right_padded,
)
from turnstream.batching.layouts.packed import Packed, packed
from turnstream.batching.layouts.padded import right_padded
from turnstream.types import MiniBatch
from turnstream.worker.tensors import (
    PaddedTensors,
    RowTensors,
    as_tensor,
    layout_tensors,
    moved,
    on_cpu,
    padded_fields,
    per_row,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RightPaddedTensors(PaddedTensors):
    """Rows that all begin in the first column; as in `batching.layouts.padded.RightPadded`."""

    _shape = "BT"

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    loss_mask_BT: Tensor
    logprobs_BT: Tensor | None
    rewards_BT: Tensor
    advantages_BT: Tensor
    token_weights_BT: Tensor | None = None

    def response_values(self, values_BT: Tensor) -> ResponseValues:
        """Return the values of the response tokens of every real row, by row id, on the CPU.

        Column t of the values belongs to the token in column t + 1.
        """
        lengths = zip(self.row_lengths, self.response_lengths, strict=True)
        return response_values_right_padded(
            on_cpu(values_BT),
            row_ids=self.row_id_B.tolist(),
            prompt_lengths=[whole - response for whole, response in lengths],
            response_lengths=self.response_lengths,
        )

    def _columns(self, width: int, response_width: int) -> dict[str, slice]:
        return {"T": slice(width)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTensors(RowTensors):
    """Concatenated rows of one micro-batch; tensors as in `batching.layouts.packed.Packed`.

    Attributes:
        max_length: slots of the longest row.
        layout: positions of the rows.
    """

    _shape = "N"

    input_ids_N: Tensor
    position_ids_N: Tensor
    cu_seqlens: Tensor
    loss_mask_N: Tensor
    logprobs_N: Tensor | None
    rewards_N: Tensor
    advantages_N: Tensor
    token_weights_N: Tensor | None = None
    max_length: int
    layout: Packed

    @property
    def row_of(self) -> Tensor:
        """int64 (N,), the row of every slot, by its position in the bin."""
        return _repeated_rows(self.cu_seqlens, num_values=len(self.input_ids_N))

    def response_values(self, values_N: Tensor) -> ResponseValues:
        """Return the values of the response tokens of every real row, by row id, on the CPU.

        Slot j of the values belongs to the token in slot j + 1.
        """
        return response_values_packed(on_cpu(values_N), self.layout)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JaggedTensors(RowTensors):
    """Rows as flat values and offsets; tensors as in `batching.layouts.jagged.Jagged`.

    Attributes:
        scoring_tokens_M: int64, position in N whose logits score the response token; -1 for none.
        layout: positions of the rows.
    """

    _shape = "M"

    input_ids_N: Tensor
    position_ids_N: Tensor
    offsets: Tensor
    response_offsets: Tensor
    scoring_tokens_M: Tensor
    loss_mask_M: Tensor
    logprobs_M: Tensor | None
    rewards_M: Tensor
    advantages_M: Tensor
    token_weights_M: Tensor | None = None
    layout: Jagged

    @property
    def response_ids_M(self) -> Tensor:
        """int64 (M,), the response tokens."""
        rows_M = self.row_of
        first_B = self.offsets[1:] - self.response_offsets[1:]
        places_M = torch.arange(len(rows_M), device=rows_M.device) + first_B[rows_M]
        return self.input_ids_N[places_M]

    @property
    def row_of(self) -> Tensor:
        """int64 (M,), the row of every response token, by its position."""
        return _repeated_rows(self.response_offsets, num_values=len(self.loss_mask_M))

    def response_values(self, values_M: Tensor) -> ResponseValues:
        """Return the values of the response tokens of every real row, by row id, on the CPU."""
        return response_values_jagged(on_cpu(values_M), self.layout)


def right_padded_to_torch(
    mini_batch: MiniBatch, *, device: torch.device | str | None = None
) -> RightPaddedTensors:
    """Return the rows of a mini-batch as tensors, on the CPU or copied to `device`.

    Raises:
        BatchingError: a row trains its first token.
    """
    rows, info = mini_batch.rows, mini_batch.info
    layout = right_padded(rows, width=info.width, pad_token_id=info.pad_token_id)
    tensors = RightPaddedTensors(**padded_fields(mini_batch), **layout_tensors(layout))
    return moved(tensors, device)


def packed_to_torch(
    mini_batch: MiniBatch,
    *,
    alignment: int | None = None,
    device: torch.device | str | None = None,
) -> list[PackedTensors]:
    """Return one value per micro-batch of the plan, on the CPU or copied to `device`.

    Args:
        mini_batch: its micro-batches are the bins.
        alignment: every row begins at a multiple of this; None for that of the run, which its
            micro-batches have capacity for.
        device: None for the CPU.

    Raises:
        BatchingError: a row trains its first token, or alignment is below 1.
    """
    rows, info = mini_batch.rows, mini_batch.info
    bins = info.micro_batches
    alignment = info.alignment if alignment is None else alignment
    layouts = packed(rows, bins=bins, pad_token_id=info.pad_token_id, alignment=alignment)
    share = per_row(mini_batch)
    parts: list[PackedTensors] = []
    for rows_of_bin, layout in zip(bins, layouts, strict=True):
        picked = torch.tensor(rows_of_bin, dtype=torch.int64)
        own = {name: v[picked] for name, v in share.items() if isinstance(v, Tensor)}
        tensors = PackedTensors(
            **(share | own),
            **layout_tensors(layout),
            max_length=layout.max_length,
            layout=layout,
        )
        parts.append(moved(tensors, device))
    return parts


def jagged_to_torch(
    mini_batch: MiniBatch, *, device: torch.device | str | None = None
) -> JaggedTensors:
    """Return the rows of a mini-batch as tensors, on the CPU or copied to `device`."""
    layout = jagged(mini_batch.rows)
    tensors = JaggedTensors(
        **per_row(mini_batch),
        **layout_tensors(layout),
        scoring_tokens_M=as_tensor(layout.scoring_tokens_M),
        layout=layout,
    )
    return moved(tensors, device)


def _repeated_rows(offsets: Tensor, *, num_values: int) -> Tensor:
    rows_B = torch.arange(len(offsets) - 1, device=offsets.device)
    return rows_B.repeat_interleave(offsets.diff(), output_size=num_values)
