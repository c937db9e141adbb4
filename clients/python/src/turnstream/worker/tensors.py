"""Mini-batches as torch tensors, in the left-padded layout, whole or by forward pass.

The other layouts are in `turnstream.worker.layouts`.

Shapes: B rows, T columns, R response columns, I items of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from turnstream.batching.layouts.outputs import ResponseValues, response_values_left_padded
from turnstream.batching.layouts.padded import left_padded
from turnstream.batching.layouts.slots import PlacedColumn
from turnstream.errors import BatchingError
from turnstream.types import Aggregation, Denominators, Extent, MiniBatch
from turnstream.types.names import few_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Data = TypeVar("Data", bound="DataclassInstance")
Layout = TypeVar("Layout", bound="RowTensors")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtraTensor:
    """An extra column in one layout, shaped as in `turnstream.batching.layouts.slots`.

    Attributes:
        per: unit that has one value.
        values: in the type of the column. Router choices have the narrowest type that holds those
            of the mini-batch: index with `values.long()`.
        is_missing: bool, for "first_tokens" alone: set where no router choice was captured and the
            dummy choice stands.
        num_items: for "items" alone: number of values of every row, in order.
    """

    per: Extent
    values: Tensor
    is_missing: Tensor | None = None
    num_items: tuple[int, ...] = ()

    def cut(self, rows: Sequence[int], *, columns: Mapping[str, slice]) -> ExtraTensor:
        """Return the values of some rows of a rectangle.

        Args:
            rows: their positions.
            columns: columns of the rectangle that remain, by extent.
        """
        if self.per == "items":
            parts = self.values.split(self.num_items)
            picked = [parts[row] for row in rows]
            values = torch.cat(picked) if picked else self.values[:0]
            num_items = tuple(self.num_items[row] for row in rows)
            return replace(self, values=values, num_items=num_items)
        index = torch.tensor(rows, dtype=torch.int64, device=self.values.device)
        own = columns.get(self.per)
        return map_tensors(self, lambda _, t: (t if own is None else t[:, own])[index])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTensors:
    """The tensors that every layout has, and all that the losses need.

    Attributes:
        row_id_B: int64, permanent name of a row; negative for inert rows.
        is_padding_B: bool, inert rows.
        weight_B: float32, weight of the row in the loss.
        trajectory_num_tokens_B, group_num_tokens_B: int64, trained tokens of the row's trajectory
            and group in the whole mini-batch.
        denominators: numbers of the whole mini-batch: all ranks, all micro-batches.
        aggregation: the run's setting; None in a batch of an older release.
        extras: name to declared extra column.
    """

    _shape: ClassVar[str]  # ends the names of the tensors with one value per token

    row_id_B: Tensor
    is_padding_B: Tensor
    weight_B: Tensor
    trajectory_num_tokens_B: Tensor
    group_num_tokens_B: Tensor
    denominators: Denominators
    aggregation: Aggregation | None = None
    extras: Mapping[str, ExtraTensor] = field(default_factory=dict[str, ExtraTensor])

    @property
    def trained_tokens(self) -> Tensor:
        """The loss mask, in the shape that token losses have in this layout."""
        return getattr(self, f"loss_mask_{self._shape}")

    @property
    def advantages(self) -> Tensor:
        """The advantages, in the shape of the loss mask."""
        return getattr(self, f"advantages_{self._shape}")

    @property
    def logprobs(self) -> Tensor | None:
        """The log-probabilities, in the shape of the loss mask; None if no row came with any."""
        return getattr(self, f"logprobs_{self._shape}")

    @property
    def token_weights(self) -> Tensor | None:
        """Weight of each token in the loss, in the shape of the loss mask; None where it is 1."""
        return getattr(self, f"token_weights_{self._shape}")

    def with_trained_tokens(self, mask: Tensor) -> Self:
        """Return the rows with another loss mask, bool in the shape of theirs."""
        return replace(self, **{f"loss_mask_{self._shape}": mask})

    @property
    def row_of(self) -> Tensor | None:
        """Row of each token in a flat layout; None where rows have their own dimension."""
        return None

    def row_sums(self, values: Tensor) -> Tensor:
        """Return the sum of every row's values, (B,); they have the shape of the loss mask."""
        rows = self.row_of
        if rows is None:
            return values.sum(dim=1)
        return row_sums(values, rows=rows, num_rows=len(self.row_id_B))

    def per_token(self, values_B: Tensor) -> Tensor:
        """Return one value per row in a shape that broadcasts to the loss mask."""
        rows = self.row_of
        return values_B[:, None] if rows is None else values_B[rows]

    def require_logprobs(self) -> Tensor:
        """Return the log-probabilities, float32 in the shape of the loss mask.

        Raises:
            BatchingError: trained tokens of the named rows have none.
        """
        logprobs = self.logprobs
        if logprobs is None:
            raise BatchingError("no row of this mini-batch came with log-probabilities")
        missing_B = self.row_sums((logprobs.isnan() & self.trained_tokens).long()) > 0
        if missing_B.any():
            names = few_of(self.row_id_B[missing_B].tolist())
            raise BatchingError(f"rows without log-probabilities: {names}")
        return logprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedTensors(RowTensors):
    """Rows that are padded to one width.

    Attributes:
        micro_batch_rows: row positions, one tuple per forward pass; as many on every rank.
        row_lengths, response_lengths: lengths of the rows, in tokens; on the host.
    """

    micro_batch_rows: tuple[tuple[int, ...], ...]
    row_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]

    def micro_batches(self) -> Iterator[Self]:
        """Yield one value per forward pass, trimmed to its own longest row and longest response.

        Adjacent rows are views; others are copied.
        """
        for rows in self.micro_batch_rows:
            yield self._cut(rows)

    def _columns(self, width: int, response_width: int) -> dict[str, slice]:
        """Return the columns that remain, by the last letter of the name of a tensor."""
        raise NotImplementedError

    def _cut(self, rows: tuple[int, ...]) -> Self:
        row_lengths = tuple(self.row_lengths[row] for row in rows)
        response_lengths = tuple(self.response_lengths[row] for row in rows)
        columns = self._columns(max(row_lengths, default=0), max(response_lengths, default=0))
        picked = self._index(rows)

        def cut(name: str, values: Tensor) -> Tensor:
            own = columns.get(name[-1])
            return (values if own is None else values[:, own])[picked]

        of_extras = {
            "token": columns["T"],
            "first_tokens": columns["T"],
            "response_token": columns.get("R", columns["T"]),
        }
        return replace(
            map_tensors(self, cut),
            micro_batch_rows=(tuple(range(len(rows))),),
            row_lengths=row_lengths,
            response_lengths=response_lengths,
            extras={name: each.cut(rows, columns=of_extras) for name, each in self.extras.items()},
        )

    def _index(self, rows: tuple[int, ...]) -> slice | Tensor:
        """Return the index of these rows: a slice, which copies nothing, for adjacent ones."""
        start = rows[0] if rows else 0
        if rows == tuple(range(start, start + len(rows))):
            return slice(start, start + len(rows))
        return torch.tensor(rows, device=self.row_id_B.device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeftPaddedTensors(PaddedTensors):
    """Rows that all end in the last column: `[PAD .. prompt response]`.

    Column j of a response tensor is column T - R + j of `input_ids_BT`. Inert rows fill the share
    of a rank. Their loss mask and weight are 0. Tensors are as in
    `batching.layouts.padded.LeftPadded`.

    Attributes:
        logprobs_BR: None if no row has any, NaN at the trained tokens of rows without. See
            `require_logprobs`.
    """

    _shape = "BR"

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    response_mask_BR: Tensor
    loss_mask_BR: Tensor
    logprobs_BR: Tensor | None
    rewards_BR: Tensor
    advantages_BR: Tensor
    token_weights_BR: Tensor | None = None

    @property
    def position_ids_BT(self) -> Tensor:
        """int64 (B, T), 0 at the first real token of every row, and on the padding before it."""
        return (self.attention_mask_BT.cumsum(dim=1) - 1).clamp(min=0)

    @property
    def response_width(self) -> int:
        """R, in tokens."""
        return self.loss_mask_BR.shape[1]

    def response_values(self, values_BR: Tensor) -> ResponseValues:
        """Return the values of the response tokens of every real row, by row id, on the CPU."""
        return response_values_left_padded(
            on_cpu(values_BR),
            row_ids=self.row_id_B.tolist(),
            response_lengths=self.response_lengths,
        )

    def _columns(self, width: int, response_width: int) -> dict[str, slice]:
        first = self.input_ids_BT.shape[1] - width
        return {"T": slice(first, None), "R": slice(self.response_width - response_width, None)}


def to_torch(
    mini_batch: MiniBatch, *, device: torch.device | str | None = None
) -> LeftPaddedTensors:
    """Return the rows of a mini-batch as tensors, on the CPU or copied to `device`."""
    rows, info = mini_batch.rows, mini_batch.info
    layout = left_padded(
        rows,
        width=info.width,
        response_width=info.response_width,
        pad_token_id=info.pad_token_id,
    )
    tensors = LeftPaddedTensors(**padded_fields(mini_batch), **layout_tensors(layout))
    return moved(tensors, device)


def padded_fields(mini_batch: MiniBatch) -> dict[str, Any]:
    """Return the arguments of `PaddedTensors` for a mini-batch, without extra columns."""
    rows = mini_batch.rows
    return {
        **per_row(mini_batch),
        "micro_batch_rows": mini_batch.info.micro_batches,
        "row_lengths": tuple(rows.input_ids.lengths.tolist()),
        "response_lengths": tuple(rows.loss_mask.lengths.tolist()),
    }


def per_row(mini_batch: MiniBatch) -> dict[str, Any]:
    """Return the arguments of `RowTensors` for a mini-batch, without extra columns."""
    rows = mini_batch.rows
    return {
        "row_id_B": as_tensor(rows.row_id),
        "is_padding_B": as_tensor(rows.is_padding),
        "weight_B": as_tensor(rows.weight),
        "trajectory_num_tokens_B": as_tensor(rows.trajectory_num_tokens),
        "group_num_tokens_B": as_tensor(rows.group_num_tokens),
        "denominators": mini_batch.info.denominators,
        "aggregation": mini_batch.info.aggregation,
    }


def layout_tensors(layout: DataclassInstance) -> dict[str, Any]:
    """Return name to tensor for the arrays of a layout, except those of `per_row`."""
    named = {each.name: getattr(layout, each.name) for each in fields(layout)}
    extras: Mapping[str, PlacedColumn] = named.pop("extras")
    tensors = {
        name: None if values is None else as_tensor(values)
        for name, values in named.items()
        if not name.endswith("_B")
    }
    return {**tensors, "extras": {name: _extra_tensor(c) for name, c in extras.items()}}


def _extra_tensor(column: PlacedColumn) -> ExtraTensor:
    return ExtraTensor(
        per=column.per,
        values=as_tensor(column.values),
        is_missing=None if column.is_missing is None else as_tensor(column.is_missing),
        num_items=() if column.num_items_B is None else tuple(column.num_items_B.tolist()),
    )


def as_tensor(values: NDArray[Any]) -> Tensor:
    """Return a tensor; a copy where the values are a read-only view of the arrived bytes."""
    flags = values.flags
    return torch.from_numpy(values if flags.writeable and flags.aligned else values.copy())


def moved(tensors: Layout, device: torch.device | str | None) -> Layout:
    """Return the tensors, with those of extra columns, as `moved_tensors` does."""
    extras = {name: moved_tensors(extra, device) for name, extra in tensors.extras.items()}
    return replace(moved_tensors(tensors, device), extras=extras)


def moved_tensors(tensors: Data, device: torch.device | str | None) -> Data:
    """Return the tensors on the device; None leaves them where they are.

    Copies to a CUDA device use pinned memory and do not block the host.
    """
    if device is None:
        return tensors
    to = torch.device(device)

    def move(_: str, tensor: Tensor) -> Tensor:
        if to.type == "cuda":
            return tensor.pin_memory().to(to, non_blocking=True)
        return tensor.to(to)

    return map_tensors(tensors, move)


def map_tensors(tensors: Data, change: Callable[[str, Tensor], Tensor]) -> Data:
    """Return the dataclass with every tensor replaced by `change(name, tensor)`."""
    values = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    changed = {n: change(n, value) for n, value in values.items() if isinstance(value, Tensor)}
    return replace(tensors, **changed)


def on_cpu(values: Tensor) -> NDArray[Any]:
    """Return the values without their gradient; bfloat16 as float32, which numpy has."""
    values = values.detach()
    return (values.float() if values.dtype is torch.bfloat16 else values).cpu().numpy()


def row_sums(values: Tensor, *, rows: Tensor, num_rows: int) -> Tensor:
    """Return the sum of every row's values, (B,), in their dtype.

    Floats are added one by one, and so in a wider type.

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
