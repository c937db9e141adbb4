"""The data of workers: ragged token rows, and mini-batches of them.

Shape suffixes in docstrings: B rows, T tokens of a row, P its prompt, T - P its response.
"""

from __future__ import annotations

import collections.abc as abc
import itertools
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import BatchingError, UnknownFormatError
from turnstream.types.extras import Extent
from turnstream.types.tag_statistics import Figures
from turnstream.types.turns import VersionRun

Scalar = TypeVar("Scalar", bound=np.generic)

Aggregation = Literal[
    "token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_mean",
    "constant",
    "rollout_mean",
    "prompt_mean",
]
"""How the losses of tokens become one loss: see `turnstream.batching.scoring.denominators`."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged(Generic[Scalar]):
    """Rows of different lengths in one flat buffer: row b is `values[offsets[b]:offsets[b + 1]]`.

    >>> rows = Ragged(np.array([1, 2, 3], np.int32), np.array([0, 2, 2, 3], np.int32))
    >>> [row.tolist() for row in rows]
    [[1, 2], [], [3]]
    """

    values: NDArray[Scalar]
    offsets: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Scalar]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[NDArray[Scalar]]:
        bounds = self.offsets.tolist()
        for start, stop in itertools.pairwise(bounds):
            yield self.values[start:stop]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32 (B,), the length of every row."""
        return np.diff(self.offsets)

    def flat(self) -> Ragged[Scalar]:
        """Return the same rows with offsets from 0 on; those of a slice begin elsewhere."""
        first, end = int(self.offsets[0]), int(self.offsets[-1])
        if not first and end == len(self.values):
            return self
        return Ragged(self.values[first:end], self.offsets - self.offsets[0])

    @classmethod
    def from_rows(cls, rows: abc.Sequence[Any], dtype: type[Scalar]) -> Ragged[Scalar]:
        """Copy ragged rows into one buffer; BatchingError for a value that `dtype` cannot hold."""
        arrays = [_as_array(row, dtype, place=place) for place, row in enumerate(rows)]
        offsets = np.zeros(len(arrays) + 1, np.int32)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return cls(values, offsets)


_PACK: Final[dict[Any, Callable[[list[Any]], bytes]]] = {
    np.int32: lambda row: struct.pack(f"{len(row)}i", *row),
    np.float32: lambda row: struct.pack(f"{len(row)}f", *row),
    np.uint8: bytes,
}
"""Lists of plain numbers to the bytes of an array, in half of numpy's time."""


def _as_array(row: Any, dtype: type[Any], *, place: int) -> NDArray[Any]:
    if type(row) is list and row and dtype in _PACK:
        try:
            return np.frombuffer(_PACK[dtype](cast("list[Any]", row)), dtype)
        except (struct.error, OverflowError, ValueError, TypeError):
            pass  # numpy converts other values, or refuses them
    given: NDArray[Any] = np.asarray(cast("Any", row))
    if given.ndim == 0:
        raise BatchingError(f"row {place} is a single value, not a row of values")
    with np.errstate(invalid="ignore"):  # NaN as a whole number: found below
        values = given.astype(dtype, copy=False)
    if values is not given and values.dtype.kind in "iu" and not np.array_equal(values, given):
        at = int(np.flatnonzero((values != given).ravel())[0])
        raise BatchingError(f"row {place}: {given.ravel()[at].item()!r} is no {values.dtype}")
    return values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """Merged turns as one token row: a prompt, then sampled and observed tokens in order.

    Attributes:
        turns: indices of the turns merged into this row, ascending.
        input_ids: int32 (T,), prompt then response.
        prompt_length: P; the response is the last T - P tokens.
        loss_mask: uint8 (T - P,), 0 on observed tokens.
        logprobs: float32 (T - P,), 0.0 where masked; None where no turn had any, NaN at the
            trained tokens of a turn without, next to others.
        rewards: float32 (T - P,).
        token_weights: float32 (T - P,), 0.0 where masked; None where the turns had none.
        version_runs: which weights sampled the response, covering T - P tokens.
        turn_spans: begin and end of every turn's own response, counted in response tokens.
        extras: values of declared columns, sorted by their names.
    """

    turns: tuple[int, ...]
    input_ids: NDArray[np.int32]
    prompt_length: int
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32] | None
    rewards: NDArray[np.float32]
    version_runs: tuple[VersionRun, ...]
    token_weights: NDArray[np.float32] | None = None
    turn_spans: tuple[tuple[int, int], ...] = ()
    extras: abc.Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])


class Denominators(NamedTuple):
    """Divisors of a loss over all ranks of a mini-batch; only rows with trained tokens count."""

    num_tokens: int
    num_sequences: int
    num_trajectories: int
    num_groups: int
    weight_sum: float
    length_constant: int


class MiniBatchTotals(NamedTuple):
    """Counts of a mini-batch over all ranks, without inert rows.

    Attributes:
        num_tokens: tokens of the rows.
        num_turn_tokens: tokens of the turns if each were sent with its whole context.
        num_trajectories: masked ones included.
        reward_sum: sum of their planned rewards, with the penalty of `overlong_buffer`.
    """

    num_rows: int
    num_tokens: int
    num_turn_tokens: int
    num_trajectories: int
    reward_sum: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperationColumns:
    """Columns of Tinker-style operations: one value per token, without a shift.

    The logits of a position score the target at the same position. A row of an operation has an
    empty prompt and no trajectory. Weights of 0 do not make it inert.

    Attributes:
        request_id: B strings, the operation; empty in inert rows alone.
        datum_index: int32 (B,), place of the row in its operation.
        target_ids: int64, one per token, or (K,) per token with the same K in all rows.
        target_weights: float32, of any sign, shaped as the ids.
        ratio_mask: float32, one per token, set where a loss averages the ratio of its row; None
            for other losses.
    """

    request_id: abc.Sequence[str]
    datum_index: NDArray[np.int32]
    target_ids: Ragged[np.int64]
    target_weights: Ragged[np.float32]
    ratio_mask: Ragged[np.float32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtraColumn:
    """An extra column: router choices, images, a teacher's log-probabilities.

    Attributes:
        per: unit of a row that has one value.
        values: row by row; a value is a number, or an array of the same `shape` everywhere.
    """

    per: Extent
    values: Ragged[Any]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the numbers."""
        return self.values.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one value; () is a number."""
        return self.values.values.shape[1:]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Token rows as ragged columns; B rows in every column.

    Attributes:
        row_id: int64 (B,), permanent name of a row; negative for inert rows.
        trajectory_id, group_id, prompt_uid, status: B strings each; empty in inert rows.
        sample, attempt, sequence_index: int32 (B,).
        is_last: bool (B,), the last sequence of its trajectory.
        is_padding: bool (B,), an inert row.
        weight: float32 (B,), 0 in inert rows.
        reward: float32 (B,), of the trajectory; NaN where it has none (a null on the wire).
        advantage: float32 (B,), of the trajectory.
        prompt_length: int32 (B,).
        trajectory_num_tokens, group_num_tokens: int64 (B,), trained tokens of the row's
            trajectory and group in this batch.
        input_ids: int32, prompt then response.
        loss_mask: uint8, one per response token.
        logprobs: float32, one per response token; None if no row has any; NaN at the trainable
            positions of a turn without, in a batch where others have them.
        rewards: float32, one per response token.
        run_versions, run_counts: the version runs of every row, -1 for observed tokens.
        advantages: float32, one per response token, where the estimator tells tokens apart; it then
            counts instead of `advantage`. Not read where masked.
        token_weights: float32, one per response token, where the mask alone does not say how much a
            token counts; 0.0 on observed tokens. None if no row has any. Not read where masked.
        operations: None unless the rows are those of Tinker-style operations.
        extras: name to declared column.
    """

    row_id: NDArray[np.int64]
    trajectory_id: abc.Sequence[str]
    group_id: abc.Sequence[str]
    prompt_uid: abc.Sequence[str]
    status: abc.Sequence[str]
    sample: NDArray[np.int32]
    attempt: NDArray[np.int32]
    sequence_index: NDArray[np.int32]
    is_last: NDArray[np.bool_]
    is_padding: NDArray[np.bool_]
    weight: NDArray[np.float32]
    reward: NDArray[np.float32]
    advantage: NDArray[np.float32]
    prompt_length: NDArray[np.int32]
    trajectory_num_tokens: NDArray[np.int64]
    group_num_tokens: NDArray[np.int64]
    input_ids: Ragged[np.int32]
    loss_mask: Ragged[np.uint8]
    logprobs: Ragged[np.float32] | None
    rewards: Ragged[np.float32]
    run_versions: Ragged[np.int64]
    run_counts: Ragged[np.int32]
    advantages: Ragged[np.float32] | None = None
    token_weights: Ragged[np.float32] | None = None
    operations: OperationColumns | None = None
    extras: abc.Mapping[str, ExtraColumn] = field(default_factory=dict[str, ExtraColumn])

    def __len__(self) -> int:
        return len(self.row_id)

    @property
    def response_lengths(self) -> NDArray[np.int32]:
        """int32 (B,), response tokens of every row, by its tokens and its prompt."""
        return self.input_ids.lengths - self.prompt_length


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchInfo:
    """The description of a mini-batch. Only the last five fields differ between ranks.

    Attributes:
        step: number of the batch, from 1.
        mini_batch: index of the mini-batch in its batch, from 0.
        manifest_hash: hex SHA-256 of the manifest: the batch's name in the chain.
        width: max(prompt + response) over all rows of all ranks, in tokens.
        response_width: the longest response of all ranks, in tokens.
        aggregation: the run's setting, by which a loss is averaged; None in a batch of an older
            release, which does not name it.
        alignment: every row of a packed micro-batch begins at a multiple of so many tokens.
        padding_share: share of padding among real rows of all ranks x `width` positions, 0 to 1.
        merge_ratio: tokens of the separate turns / tokens of the real rows of all ranks.
        oldest_version, newest_version: over the trained tokens; None if unknown.
        totals: counts of all ranks; None in a batch of an older release, and of operations.
        figures: tags and metrics of the whole batch, in its first mini-batch; empty in the others.
        num_real_rows, num_inert_rows: numbers of rows of this rank.
        micro_batches: row positions of this rank, one tuple per forward pass; every rank has the
            same number of them.
    """

    run: str
    step: int
    revision: int
    lineage: str
    mini_batch: int
    num_mini_batches: int
    manifest_hash: str
    assembly_version: int
    config_revision: int
    pad_token_id: int
    alignment: int = 1
    width: int
    response_width: int
    denominators: Denominators
    aggregation: Aggregation | None = None
    padding_share: float
    merge_ratio: float
    oldest_version: int | None
    newest_version: int | None
    totals: MiniBatchTotals | None = None
    figures: Figures = field(default_factory=Figures)
    dp_rank: int
    dp_world_size: int
    num_real_rows: int
    num_inert_rows: int
    micro_batches: tuple[tuple[int, ...], ...]

    @property
    def is_last(self) -> bool:
        """Whether the batch is finished after this mini-batch."""
        return self.mini_batch == self.num_mini_batches - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MiniBatch:
    """One rank's rows of one optimizer update."""

    rows: Rows
    info: MiniBatchInfo

    @property
    def denominators(self) -> Denominators:
        """Divisors of the sums of a loss, the same on all ranks."""
        return self.info.denominators


TOKEN_FORMAT = 1
"""Format of the text of a recovery token."""

_TOKEN = re.compile(r"v(?P<version>[0-9]{1,9}):(?P<content>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryToken:
    """Names a batch of a run's history; a trainer keeps it in the checkpoint made after it.

    >>> token = RecoveryToken(lineage="main", step=7, chain_hash="ab12")
    >>> str(token)
    'v1:main:7:ab12'
    >>> RecoveryToken.parse("v1:main:7:ab12") == token
    True
    """

    lineage: str
    step: int
    chain_hash: str

    def __str__(self) -> str:
        return f"v{TOKEN_FORMAT}:{self.lineage}:{self.step}:{self.chain_hash}"

    @classmethod
    def parse(cls, text: str) -> RecoveryToken:
        """Return the token of a text of `str(token)`.

        Raises:
            UnknownFormatError: another release wrote it.
            ValueError: the text is not a token.
        """
        found = _TOKEN.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not a recovery token")
        version = int(found["version"])
        if version != TOKEN_FORMAT:
            raise UnknownFormatError("the recovery token", version, TOKEN_FORMAT)
        lineage, step, chain_hash = found["content"].rsplit(":", 2)
        return cls(lineage=lineage, step=int(step), chain_hash=chain_hash)
