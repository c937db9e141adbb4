"""Training calls of one model as rows, and one rank's share of each pass: pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from turnstream.batching.merge.plan import PLAIN_ASSEMBLY_VERSION
from turnstream.batching.packing.microbatch import Budget
from turnstream.batching.rows.minibatch import cut_ranks, rank_passes, take_share
from turnstream.batching.rows.operations import (
    Operation,
    check_operation,
    operation_rows,
    operations_by_pass,
)
from turnstream.batching.rows.plain_rows import INERT_LENGTH
from turnstream.records.batches import EncodedMiniBatch, encode_mini_batch
from turnstream.records.encoding import reading
from turnstream.types import Denominators, MiniBatch, MiniBatchInfo, Rows
from turnstream_server.batcher.assembly.shares import Cut, num_bytes_of
from turnstream_server.operations.keys import RequestId
from turnstream_server.operations.operation_records import decode_operation

FORWARD_TOKENS: Final = 16_384
"""Most positions of one forward pass, padding included; a longer row has a pass of its own.

All ranks run as many forward passes, so that only a cut over the rows of all ranks can limit them.
"""

_BUDGET: Final = Budget(limit=FORWARD_TOKENS)
_PAD_TOKEN_ID: Final = 0
"""Token of inert rows, which every vocabulary has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationPass:
    """The rows of operations that share a loss: a row per datum, divided among all ranks."""

    loss: str
    settings: Mapping[str, float]
    rows: Rows
    cut: Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationPasses:
    """Training calls of a model that run together; passes are in order of their first calls."""

    model_id: str
    first: int
    passes: tuple[OperationPass, ...]


def cut_operations(
    model_id: str, bodies: Mapping[int, bytes], *, first: int, dp_world_size: int
) -> OperationPasses:
    """Return the passes over training calls, divided among ranks.

    Row ids count up from 0, in order of commands and of their datums. In each pass, all ranks have
    equally many rows and forward passes. Tokens are balanced: no rank has more than the mean of all
    ranks plus the longest row, up to 2^17 rows x ranks.

    `bodies` are those of the commands that are not skipped, by number; `first` may be skipped. A
    BatchingError names an operation whose rows cannot be computed or divided.
    """
    operations = [_operation(model_id, number, bodies[number]) for number in sorted(bodies)]
    counts = [len(operation.data) for operation in operations]
    starts = itertools.accumulate(counts, initial=0)
    row_ids = {
        operation.request_id: np.arange(start, start + count, dtype=np.int64)
        for operation, start, count in zip(operations, starts, counts, strict=False)
    }
    passes: list[OperationPass] = []
    for shared in operations_by_pass(operations):
        ids_B = np.concatenate([row_ids[operation.request_id] for operation in shared])
        rows = replace(operation_rows(shared, first_row_id=0), row_id=ids_B)
        passes.append(
            OperationPass(
                loss=shared[0].loss,
                settings=shared[0].settings,
                rows=rows,
                cut=_cut(rows, dp_world_size=dp_world_size),
            )
        )
    return OperationPasses(model_id=model_id, first=first, passes=tuple(passes))


def encode_operation_share(
    operations: OperationPasses, *, index: int, dp_rank: int
) -> EncodedMiniBatch:
    """Return one rank's share of a pass, encoded; the same arguments give the same bytes."""
    own = operations.passes[index]
    share = take_share(
        own.rows,
        own.cut.ranks[dp_rank],
        step=operations.first,
        mini_batch=index,
        pad_token_id=_PAD_TOKEN_ID,
    )
    info = _info(operations, share, index=index, dp_rank=dp_rank)
    return encode_mini_batch(MiniBatch(rows=share, info=info))


def num_bytes_of_passes(operations: OperationPasses) -> int:
    """Return the memory of all passes in bytes, roughly."""
    return sum(num_bytes_of(each.rows) + num_bytes_of(each.cut) for each in operations.passes)


def _operation(model_id: str, number: int, body: bytes) -> Operation:
    with reading(f"command {number} of model {model_id!r} is no operation"):
        operation = decode_operation(body, request_id=str(RequestId(model_id, number)))
    check_operation(operation)
    return operation


def _cut(rows: Rows, *, dp_world_size: int) -> Cut:
    lengths_B = rows.input_ids.lengths
    ranks = cut_ranks(lengths_B, dp_world_size=dp_world_size, budget=_BUDGET)
    return Cut(ranks=ranks, passes=rank_passes(lengths_B, ranks, budget=_BUDGET))


def _info(operations: OperationPasses, share: Rows, *, index: int, dp_rank: int) -> MiniBatchInfo:
    """Return the description of a share: its run is the model, its step the first command."""
    own = operations.passes[index]
    lengths_B = own.rows.input_ids.lengths
    width = max(int(lengths_B.max()), INERT_LENGTH)
    num_inert_rows = int(np.count_nonzero(share.is_padding))
    return MiniBatchInfo(
        run=operations.model_id,
        step=operations.first,
        revision=0,
        lineage="",
        mini_batch=index,
        num_mini_batches=len(operations.passes),
        manifest_hash="",
        assembly_version=PLAIN_ASSEMBLY_VERSION,
        config_revision=0,
        pad_token_id=_PAD_TOKEN_ID,
        width=width,
        response_width=width,
        denominators=_denominators(own.rows),
        padding_share=1.0 - int(lengths_B.sum()) / (len(own.rows) * width),
        merge_ratio=1.0,
        oldest_version=None,
        newest_version=None,
        dp_rank=dp_rank,
        dp_world_size=len(own.cut.ranks),
        num_real_rows=len(share) - num_inert_rows,
        num_inert_rows=num_inert_rows,
        micro_batches=tuple(map(tuple, own.cut.passes[dp_rank])),
    )


def _denominators(rows: Rows) -> Denominators:
    return Denominators(
        num_tokens=int(rows.input_ids.lengths.sum()),
        num_sequences=len(rows),
        num_trajectories=len(rows),
        num_groups=len(rows),
        weight_sum=float(len(rows)),
        length_constant=0,
    )
