"""Mini-batches as torch tensors, in the left-padded layout, whole or by forward pass.

The other layouts are in `turnstream.worker.layouts`.

Shapes: B rows, T columns, R response columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from turnstream.batching.extra_layouts import left_padded_extras
from turnstream.batching.layout import left_padded
from turnstream.batching.outputs import ResponseValues, response_values_left_padded
from turnstream.errors import BatchingError
from turnstream.types import Denominators, MiniBatch
from turnstream.worker.extras import ExtraTensor, extra_tensors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Tensors = TypeVar("Tensors", bound="DataclassInstance")
"""A dataclass that holds tensors."""


class TokenRows(Protocol):
    """What losses need of rows, in any layout.

    The row tensors are those of `LeftPaddedTensors`, of the same names.
    """

    @property
    def row_id_B(self) -> Tensor:
        """Of dtype int64."""
        ...

    @property
    def is_padding_B(self) -> Tensor:
        """Of dtype bool."""
        ...

    @property
    def weight_B(self) -> Tensor:
        """Of dtype float32."""
        ...

    @property
    def trajectory_num_tokens_B(self) -> Tensor:
        """Of dtype int64."""
        ...

    @property
    def group_num_tokens_B(self) -> Tensor:
        """Of dtype int64."""
        ...

    @property
    def trained_tokens(self) -> Tensor:
        """The loss mask, in the shape that token losses have in this layout."""
        ...

    @property
    def token_weights(self) -> Tensor | None:
        """What each token counts for, in the same shape; None where that is 1."""
        ...

    @property
    def row_of(self) -> Tensor | None:
        """Which row each token is of, where rows have no dimension of their own."""
        ...

    def row_sums(self, values: Tensor, /) -> Tensor:
        """(B,), the sum of every row's values."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeftPaddedTensors:
    """Rows that all end in the last column: `[PAD .. prompt response]`.

    Column j of a response tensor is column T - R + j of `input_ids_BT`. Inert rows, which fill a
    rank's share up, have an all-zero loss mask and weight.

    Attributes:
        input_ids_BT: int64.
        attention_mask_BT: bool, set on real tokens.
        response_mask_BR: bool, set on response tokens, observed ones included.
        loss_mask_BR: bool, set on trained tokens.
        logprobs_BR: float32, under the sampling policy, 0.0 where not trained; None if no row has
            any, NaN at the trained tokens of rows without. See `require_logprobs`.
        rewards_BR: float32, token rewards.
        advantages_BR: float32, 0.0 where not trained.
        token_weights_BR: float32, what a token counts for in the loss; None where that is 1.
        extras: the columns that the run declares, by name.
        row_id_B: int64, names a row for ever; negative for inert rows.
        is_padding_B: bool, inert rows.
        weight_B: float32, of the row in the loss.
        trajectory_num_tokens_B, group_num_tokens_B: int64, trained tokens of the row's trajectory
            and group in the whole mini-batch.
        denominators: of the whole mini-batch: all ranks, all micro-batches.
        micro_batch_rows: row positions, one tuple per forward pass; as many on every rank.
        row_lengths, response_lengths: of every row, in tokens; they need no look at the device.
    """

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    response_mask_BR: Tensor
    loss_mask_BR: Tensor
    logprobs_BR: Tensor | None
    rewards_BR: Tensor
    advantages_BR: Tensor
    row_id_B: Tensor
    is_padding_B: Tensor
    weight_B: Tensor
    trajectory_num_tokens_B: Tensor
    group_num_tokens_B: Tensor
    denominators: Denominators
    micro_batch_rows: tuple[tuple[int, ...], ...]
    row_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    token_weights_BR: Tensor | None = None
    extras: Mapping[str, ExtraTensor] = field(default_factory=dict[str, ExtraTensor])

    @property
    def position_ids_BT(self) -> Tensor:
        """int64 (B, T), 0 at the first real token of every row, and on the padding before it."""
        return (self.attention_mask_BT.cumsum(dim=1) - 1).clamp(min=0)

    @property
    def response_width(self) -> int:
        """R, in tokens."""
        return self.loss_mask_BR.shape[1]

    @property
    def trained_tokens(self) -> Tensor:
        """The loss mask, (B, R): the shape that token losses have in this layout."""
        return self.loss_mask_BR

    @property
    def token_weights(self) -> Tensor | None:
        """What each token counts for, (B, R); None where that is 1."""
        return self.token_weights_BR

    @property
    def row_of(self) -> None:
        """Rows have a dimension of their own."""
        return None

    def row_sums(self, values_BR: Tensor) -> Tensor:
        """(B,), the sum of every row's values."""
        return values_BR.sum(dim=1)

    def require_logprobs(self) -> Tensor:
        """float32 (B, R), `logprobs_BR` where every trained token has one.

        Raises:
            BatchingError: names the rows without.
        """
        return checked_logprobs(self.logprobs_BR, self)

    def response_values(self, values_BR: Tensor) -> ResponseValues:
        """What a model gave, by row id: exactly the response tokens of every real row, on the CPU.

        `turnstream.batching.outputs.join_by_row_id` puts the parts of all passes together.
        """
        return response_values_left_padded(
            on_cpu(values_BR),
            row_ids=self.row_id_B.tolist(),
            response_lengths=self.response_lengths,
        )

    def micro_batches(self) -> Iterator[LeftPaddedTensors]:
        """One value per forward pass, each trimmed to its own longest row and longest response.

        Rows that lie side by side are views; others are copied.
        """
        for rows in self.micro_batch_rows:
            yield self._cut(rows)

    def _cut(self, rows: tuple[int, ...]) -> LeftPaddedTensors:
        lengths = tuple(self.row_lengths[row] for row in rows)
        responses = tuple(self.response_lengths[row] for row in rows)
        first_column = {
            "T": self.input_ids_BT.shape[1] - max(lengths, default=0),
            "R": self.response_width - max(responses, default=0),
        }
        picked = self._index(rows)

        def cut(name: str, values: Tensor) -> Tensor:
            start = first_column.get(name[-1])
            return (values if start is None else values[:, start:])[picked]

        columns = {
            "token": slice(first_column["T"], None),
            "first_tokens": slice(first_column["T"], None),
            "response_token": slice(first_column["R"], None),
        }
        return replace(
            map_tensors(self, cut),
            micro_batch_rows=(tuple(range(len(rows))),),
            row_lengths=lengths,
            response_lengths=responses,
            extras={name: extra.cut(rows, columns=columns) for name, extra in self.extras.items()},
        )

    def _index(self, rows: tuple[int, ...]) -> slice | Tensor:
        """What picks these rows: a slice, which copies nothing, where they lie side by side."""
        start = rows[0] if rows else 0
        if rows == tuple(range(start, start + len(rows))):
            return slice(start, start + len(rows))
        return torch.tensor(rows, device=self.row_id_B.device)


def to_torch(
    mini_batch: MiniBatch, *, device: torch.device | str | None = None
) -> LeftPaddedTensors:
    """The rows of a mini-batch as tensors, on the CPU or copied to `device`.

    To a CUDA device the copies go through pinned memory and do not block the host.
    """
    rows, info = mini_batch.rows, mini_batch.info
    padded = left_padded(
        rows,
        width=info.width,
        response_width=info.response_width,
        pad_token_id=info.pad_token_id,
    )
    tensors = LeftPaddedTensors(
        input_ids_BT=torch.from_numpy(padded.input_ids_BT),
        attention_mask_BT=torch.from_numpy(padded.attention_mask_BT),
        response_mask_BR=torch.from_numpy(padded.response_mask_BR),
        loss_mask_BR=torch.from_numpy(padded.loss_mask_BR),
        logprobs_BR=optional(padded.logprobs_BR),
        rewards_BR=torch.from_numpy(padded.rewards_BR),
        advantages_BR=torch.from_numpy(padded.advantages_BR),
        row_id_B=copied(rows.row_id),
        is_padding_B=copied(rows.is_padding),
        weight_B=copied(rows.weight),
        trajectory_num_tokens_B=copied(rows.trajectory_num_tokens),
        group_num_tokens_B=copied(rows.group_num_tokens),
        denominators=info.denominators,
        micro_batch_rows=info.micro_batches,
        row_lengths=tuple(rows.input_ids.lengths.tolist()),
        response_lengths=tuple(rows.loss_mask.lengths.tolist()),
        token_weights_BR=optional(padded.token_weights_BR),
        extras=extra_tensors(
            left_padded_extras(rows, width=info.width, response_width=info.response_width)
        ),
    )
    return moved(tensors, device)


def checked_logprobs(logprobs: Tensor | None, rows: TokenRows) -> Tensor:
    """The log-probabilities of any layout, where every trained token has one.

    Raises:
        BatchingError: names the rows without.
    """
    if logprobs is None:
        raise BatchingError("no row of this mini-batch came with log-probabilities")
    missing_B = rows.row_sums((logprobs.isnan() & rows.trained_tokens).long()) > 0
    if missing_B.any():
        names = ", ".join(map(str, rows.row_id_B[missing_B].tolist()))
        raise BatchingError(f"rows without log-probabilities: {names}")
    return logprobs


def moved(tensors: Tensors, device: torch.device | str | None) -> Tensors:
    """With every tensor on the device; None leaves them.

    To a CUDA device the copies go through pinned memory and do not block the host.
    """
    if device is None:
        return tensors
    device = torch.device(device)
    extras: Mapping[str, ExtraTensor] = getattr(tensors, "extras", {})
    if extras:
        there = {name: extra.on_device(device) for name, extra in extras.items()}
        tensors = replace(tensors, extras=there)
    if device.type == "cuda":
        return map_tensors(tensors, lambda _, t: t.pin_memory().to(device, non_blocking=True))
    return map_tensors(tensors, lambda _, t: t.to(device))


def map_tensors(tensors: Tensors, change: Callable[[str, Tensor], Tensor]) -> Tensors:
    """With `change(name, tensor)` in the place of every tensor."""
    values = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    changed = {n: change(n, value) for n, value in values.items() if isinstance(value, Tensor)}
    return replace(tensors, **changed)


def optional(values: NDArray[Any] | None) -> Tensor | None:
    """The same values as a tensor, if there are any."""
    return None if values is None else torch.from_numpy(values)


def copied(values: NDArray[Any]) -> Tensor:
    """A tensor of its own: columns are read-only views of the arrived bytes."""
    return torch.from_numpy(values.copy())


def on_cpu(values: Tensor) -> NDArray[Any]:
    """The values without their gradient; in float32 where numpy has no such type."""
    values = values.detach()
    return (values.float() if values.dtype is torch.bfloat16 else values).cpu().numpy()


def row_sums(values: Tensor, *, rows: Tensor, num_rows: int) -> Tensor:
    """(B,), sums over the values of each row, in their dtype.

    They are added one after the other, so floats in a wider type.

    Args:
        values: (N,).
        rows: int64 (N,), the row of each.
        num_rows: B.
    """
    wide = values.dtype
    if wide.is_floating_point:
        wide = torch.float32 if values.device.type == "mps" else torch.float64
    zeros_B = torch.zeros(num_rows, dtype=wide, device=values.device)
    return zeros_B.index_add(0, rows, values.to(wide)).to(values.dtype)
