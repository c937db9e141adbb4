"""Mini-batches as torch tensors in the layouts without left padding.

    for part in packed_to_torch(mini_batch):
        logits_NV = model(part.input_ids_N, part.position_ids_N, part.cu_seqlens, part.max_length)
        current_N = next_token_logprobs(logits_NV, input_ids=part.input_ids_N)
        loss_N = ppo_clip(current_N, old_BR=old_N, advantages_BR=part.advantages_N, ...)
        aggregate(loss_N, part, mode=..., denominators=part.denominators).backward()

Losses that look at one token at a time take tensors of any of these shapes. Those with a ratio per
row (GSPO, sequence and geometric corrections) want `row_of=part.row_of` too where a tensor has no
dimension of rows.

Shapes: B rows, T columns, N slots of a bin or tokens of all rows, M response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypedDict

import torch
from torch import Tensor

from turnstream.batching.extra_layouts import jagged_extras, packed_extras, right_padded_extras
from turnstream.batching.jagged import Jagged, jagged
from turnstream.batching.outputs import (
    ResponseValues,
    response_values_jagged,
    response_values_packed,
    response_values_right_padded,
)
from turnstream.batching.packed import Packed, packed
from turnstream.batching.right_padded import right_padded
from turnstream.types import Denominators, MiniBatch, Rows
from turnstream.worker.extras import ExtraTensor, extra_tensors
from turnstream.worker.tensors import (
    checked_logprobs,
    copied,
    map_tensors,
    moved,
    on_cpu,
    optional,
    row_sums,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTensors:
    """What every layout holds once per row.

    Attributes:
        row_id_B: int64, names a row for ever; negative for inert rows.
        is_padding_B: bool, inert rows.
        weight_B: float32, of the row in the loss.
        trajectory_num_tokens_B, group_num_tokens_B: int64, trained tokens of the row's trajectory
            and group in the whole mini-batch.
        denominators: of the whole mini-batch: all ranks, all micro-batches.
    """

    row_id_B: Tensor
    is_padding_B: Tensor
    weight_B: Tensor
    trajectory_num_tokens_B: Tensor
    group_num_tokens_B: Tensor
    denominators: Denominators


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RightPaddedTensors(RowTensors):
    """Rows that all begin in the first column; columns as in `batching.right_padded.RightPadded`.

    Attributes:
        micro_batch_rows: row positions, one tuple per forward pass; as many on every rank.
        prompt_lengths, response_lengths: of every row, in tokens.
        extras: the columns that the run declares, by name.
    """

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    loss_mask_BT: Tensor
    logprobs_BT: Tensor | None
    rewards_BT: Tensor
    advantages_BT: Tensor
    micro_batch_rows: tuple[tuple[int, ...], ...]
    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    token_weights_BT: Tensor | None = None
    extras: Mapping[str, ExtraTensor] = field(default_factory=dict[str, ExtraTensor])

    @property
    def trained_tokens(self) -> Tensor:
        """The loss mask, (B, T): the shape that token losses have in this layout."""
        return self.loss_mask_BT

    @property
    def token_weights(self) -> Tensor | None:
        """What each token counts for, (B, T); None where that is 1."""
        return self.token_weights_BT

    @property
    def row_of(self) -> None:
        """Rows have a dimension of their own."""
        return None

    def row_sums(self, values_BT: Tensor) -> Tensor:
        """(B,), the sum of every row's values."""
        return values_BT.sum(dim=1)

    def require_logprobs(self) -> Tensor:
        """float32 (B, T), `logprobs_BT` where every trained token has one; BatchingError if not."""
        return checked_logprobs(self.logprobs_BT, self)

    def response_values(self, values_BT: Tensor) -> ResponseValues:
        """What a model gave, by row id: exactly the response tokens of every real row, on the CPU.

        Column t of the values belongs to the token in column t + 1.
        """
        return response_values_right_padded(
            on_cpu(values_BT),
            row_ids=self.row_id_B.tolist(),
            prompt_lengths=self.prompt_lengths,
            response_lengths=self.response_lengths,
        )

    def micro_batches(self) -> Iterator[RightPaddedTensors]:
        """One value per forward pass, each trimmed to its own longest row."""
        for rows in self.micro_batch_rows:
            yield self._cut(rows)

    def _cut(self, rows: tuple[int, ...]) -> RightPaddedTensors:
        prompts = tuple(self.prompt_lengths[row] for row in rows)
        responses = tuple(self.response_lengths[row] for row in rows)
        width = max((p + r for p, r in zip(prompts, responses, strict=True)), default=0)
        picked = torch.tensor(rows, dtype=torch.int64, device=self.row_id_B.device)

        def cut(name: str, values: Tensor) -> Tensor:
            return (values[:, :width] if name.endswith("T") else values)[picked]

        columns = {name: slice(width) for name in ("token", "first_tokens", "response_token")}
        return replace(
            map_tensors(self, cut),
            micro_batch_rows=(tuple(range(len(rows))),),
            prompt_lengths=prompts,
            response_lengths=responses,
            extras={name: extra.cut(rows, columns=columns) for name, extra in self.extras.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTensors(RowTensors):
    """Rows of one micro-batch, one behind the other; tensors as in `batching.packed.Packed`.

    Attributes:
        max_length: slots of the longest row.
        layout: where the rows stand.
        extras: the columns that the run declares, by name.
    """

    input_ids_N: Tensor
    position_ids_N: Tensor
    cu_seqlens: Tensor
    loss_mask_N: Tensor
    logprobs_N: Tensor | None
    rewards_N: Tensor
    advantages_N: Tensor
    max_length: int
    layout: Packed
    token_weights_N: Tensor | None = None
    extras: Mapping[str, ExtraTensor] = field(default_factory=dict[str, ExtraTensor])

    @property
    def trained_tokens(self) -> Tensor:
        """The loss mask, (N,): the shape that token losses have in this layout."""
        return self.loss_mask_N

    @property
    def token_weights(self) -> Tensor | None:
        """What each token counts for, (N,); None where that is 1."""
        return self.token_weights_N

    @property
    def row_of(self) -> Tensor:
        """int64 (N,), the row of every slot, by its position in the bin."""
        return _repeated_rows(self.cu_seqlens, num_values=len(self.input_ids_N))

    def row_sums(self, values_N: Tensor) -> Tensor:
        """(B,), the sum of every row's values."""
        return row_sums(values_N, rows=self.row_of, num_rows=len(self.row_id_B))

    def require_logprobs(self) -> Tensor:
        """float32 (N,), `logprobs_N` where every trained token has one; BatchingError if not."""
        return checked_logprobs(self.logprobs_N, self)

    def response_values(self, values_N: Tensor) -> ResponseValues:
        """What a model gave, by row id: exactly the response tokens of every real row, on the CPU.

        Slot j of the values belongs to the token in slot j + 1.
        """
        return response_values_packed(on_cpu(values_N), self.layout)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JaggedTensors(RowTensors):
    """Rows as flat values and offsets; tensors as in `batching.jagged.Jagged`.

    Attributes:
        scoring_tokens_M: int64, which token's logits score each response token; -1 for none.
        layout: where the rows stand.
        extras: the columns that the run declares, by name.
    """

    input_ids_N: Tensor
    position_ids_N: Tensor
    offsets: Tensor
    response_offsets: Tensor
    scoring_tokens_M: Tensor
    loss_mask_M: Tensor
    logprobs_M: Tensor | None
    rewards_M: Tensor
    advantages_M: Tensor
    layout: Jagged
    token_weights_M: Tensor | None = None
    extras: Mapping[str, ExtraTensor] = field(default_factory=dict[str, ExtraTensor])

    @property
    def trained_tokens(self) -> Tensor:
        """The loss mask, (M,): the shape that token losses have in this layout."""
        return self.loss_mask_M

    @property
    def token_weights(self) -> Tensor | None:
        """What each token counts for, (M,); None where that is 1."""
        return self.token_weights_M

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

    def row_sums(self, values_M: Tensor) -> Tensor:
        """(B,), the sum of every row's values."""
        return row_sums(values_M, rows=self.row_of, num_rows=len(self.row_id_B))

    def require_logprobs(self) -> Tensor:
        """float32 (M,), `logprobs_M` where every trained token has one; BatchingError if not."""
        return checked_logprobs(self.logprobs_M, self)

    def response_values(self, values_M: Tensor) -> ResponseValues:
        """What a model gave for the response tokens, by row id, on the CPU; real rows only."""
        return response_values_jagged(on_cpu(values_M), self.layout)


def right_padded_to_torch(
    mini_batch: MiniBatch, *, device: torch.device | str | None = None
) -> RightPaddedTensors:
    """The rows of a mini-batch as tensors, on the CPU or copied to `device`.

    Raises:
        BatchingError: a row trains its first token.
    """
    rows, info = mini_batch.rows, mini_batch.info
    layout = right_padded(rows, width=info.width, pad_token_id=info.pad_token_id)
    tensors = RightPaddedTensors(
        **_row_tensors(rows, info.denominators),
        input_ids_BT=torch.from_numpy(layout.input_ids_BT),
        attention_mask_BT=torch.from_numpy(layout.attention_mask_BT),
        loss_mask_BT=torch.from_numpy(layout.loss_mask_BT),
        logprobs_BT=optional(layout.logprobs_BT),
        token_weights_BT=optional(layout.token_weights_BT),
        rewards_BT=torch.from_numpy(layout.rewards_BT),
        advantages_BT=torch.from_numpy(layout.advantages_BT),
        micro_batch_rows=info.micro_batches,
        extras=extra_tensors(right_padded_extras(rows, width=info.width)),
        prompt_lengths=tuple(layout.prompt_length_B.tolist()),
        response_lengths=tuple(layout.response_length_B.tolist()),
    )
    return moved(tensors, device)


def packed_to_torch(
    mini_batch: MiniBatch,
    *,
    alignment: int | None = None,
    device: torch.device | str | None = None,
) -> list[PackedTensors]:
    """One value per micro-batch of the plan, on the CPU or copied to `device`.

    Args:
        mini_batch: its micro-batches are the bins.
        alignment: every row begins at a multiple of this: `batching.packed.sequence_alignment`;
            None for that of the run, which its micro-batches have room for.
        device: None for the CPU.

    Raises:
        BatchingError: a row trains its first token, or alignment is below 1.
    """
    rows, info = mini_batch.rows, mini_batch.info
    bins = info.micro_batches
    alignment = info.alignment if alignment is None else alignment
    layouts = packed(rows, bins=bins, pad_token_id=info.pad_token_id, alignment=alignment)
    extras = packed_extras(rows, bins=bins, alignment=alignment)
    of_rows = _row_tensors(rows, info.denominators)
    parts: list[PackedTensors] = []
    for rows_of_bin, layout, placed in zip(bins, layouts, extras, strict=True):
        picked = torch.tensor(rows_of_bin, dtype=torch.int64)
        own = {name: v[picked] for name, v in of_rows.items() if isinstance(v, Tensor)}
        tensors = PackedTensors(
            **own,
            denominators=info.denominators,
            input_ids_N=torch.from_numpy(layout.input_ids_N),
            position_ids_N=torch.from_numpy(layout.position_ids_N),
            cu_seqlens=torch.from_numpy(layout.cu_seqlens),
            loss_mask_N=torch.from_numpy(layout.loss_mask_N),
            logprobs_N=optional(layout.logprobs_N),
            token_weights_N=optional(layout.token_weights_N),
            rewards_N=torch.from_numpy(layout.rewards_N),
            advantages_N=torch.from_numpy(layout.advantages_N),
            max_length=layout.max_length,
            layout=layout,
            extras=extra_tensors(placed),
        )
        parts.append(moved(tensors, device))
    return parts


def jagged_to_torch(
    mini_batch: MiniBatch, *, device: torch.device | str | None = None
) -> JaggedTensors:
    """The rows of a mini-batch as tensors, on the CPU or copied to `device`."""
    rows = mini_batch.rows
    layout = jagged(rows)
    weights_M = layout.token_weights_M
    tensors = JaggedTensors(
        **_row_tensors(rows, mini_batch.info.denominators),
        input_ids_N=torch.from_numpy(layout.input_ids_N),
        position_ids_N=torch.from_numpy(layout.position_ids_N),
        offsets=torch.from_numpy(layout.offsets),
        response_offsets=torch.from_numpy(layout.response_offsets),
        scoring_tokens_M=torch.from_numpy(layout.scoring_tokens_M),
        loss_mask_M=copied(layout.loss_mask_M),
        logprobs_M=None if layout.logprobs_M is None else copied(layout.logprobs_M),
        token_weights_M=None if weights_M is None else copied(weights_M),
        rewards_M=copied(layout.rewards_M),
        advantages_M=torch.from_numpy(layout.advantages_M),
        layout=layout,
        extras=extra_tensors(jagged_extras(rows)),
    )
    return moved(tensors, device)


class _OfRows(TypedDict):
    row_id_B: Tensor
    is_padding_B: Tensor
    weight_B: Tensor
    trajectory_num_tokens_B: Tensor
    group_num_tokens_B: Tensor
    denominators: Denominators


def _row_tensors(rows: Rows, denominators: Denominators) -> _OfRows:
    return _OfRows(
        row_id_B=copied(rows.row_id),
        is_padding_B=copied(rows.is_padding),
        weight_B=copied(rows.weight),
        trajectory_num_tokens_B=copied(rows.trajectory_num_tokens),
        group_num_tokens_B=copied(rows.group_num_tokens),
        denominators=denominators,
    )


def _repeated_rows(offsets: Tensor, *, num_values: int) -> Tensor:
    """int64 (num_values,), the row that every value belongs to."""
    rows_B = torch.arange(len(offsets) - 1, device=offsets.device)
    return rows_B.repeat_interleave(offsets.diff(), output_size=num_values)
