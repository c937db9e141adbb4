"""The rows of a planned mini-batch, and one rank's share: pure functions of plan and payload."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from turnstream.batching.config import BatchingConfig
from turnstream.batching.merge.plan import ASSEMBLY_VERSION, GroupPlan, Manifest, TrajectoryPlan
from turnstream.batching.packing.bins import Bins
from turnstream.batching.rows.assemble import assemble_rows
from turnstream.batching.rows.minibatch import cut_ranks, rank_passes, rows_multiple, take_share
from turnstream.batching.rows.plain_rows import INERT_LENGTH, INERT_RESPONSE_LENGTH
from turnstream.errors import BatchingError, RecordError, UnknownFormatError
from turnstream.records.batches import EncodedMiniBatch, encode_mini_batch
from turnstream.types import (
    Figures,
    MiniBatch,
    MiniBatchInfo,
    MiniBatchTotals,
    OperationColumns,
    Ragged,
    Rows,
    StoredTurns,
)
from turnstream_server.batcher.assembly.payload import Damage, DamagedPayloadError, PayloadReader

_logger = logging.getLogger(__name__)

_NAMES_AGGREGATION: Final = 4
"""First assembly version whose mini-batches name the aggregation of the run."""

_HAS_TOTALS: Final = 5
"""First assembly version whose mini-batches have the counts of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A manifest, its hash, and the config that it was made under."""

    manifest: Manifest
    manifest_hash: str
    config: BatchingConfig

    def groups_of(self, mini_batch: int) -> tuple[GroupPlan, ...]:
        """Return the groups of one optimizer update, in order."""
        plan = self.manifest.mini_batches[mini_batch]
        return self.manifest.groups[plan.first_group : plan.first_group + plan.num_groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The rows of a mini-batch, divided among all ranks of a world size.

    Attributes:
        ranks: row positions of every rank; those from the number of rows on are inert rows.
        passes: forward passes of every rank, as positions in its share.
    """

    ranks: list[list[int]]
    passes: list[Bins]


def check_assembly_version(manifest: Manifest) -> None:
    """Refuse a plan that a newer release assembles by other rules, with an UnknownFormatError."""
    if manifest.assembly_version > ASSEMBLY_VERSION:
        raise UnknownFormatError("assembly", manifest.assembly_version, ASSEMBLY_VERSION)


def build_rows(batch: PlannedBatch, reader: PayloadReader, *, mini_batch: int) -> Rows:
    """Return all rows of a mini-batch; an error names trajectories that cannot be assembled."""
    groups = batch.groups_of(mini_batch)
    members = [member for group in groups for member in group.trajectories]
    run, first_row_id = batch.manifest.run, batch.manifest.mini_batches[mini_batch].first_row_id
    assemble = functools.partial(
        assemble_rows,
        extra_columns=batch.config.extra_columns,
        masked_versions=batch.manifest.masked_versions,
    )
    try:
        turns = reader.read_columns(members, run=run)
        return assemble(groups, turns, first_row_id=first_row_id)
    except (BatchingError, RecordError) as error:
        _logger.warning(
            "run %s, step %d: it is read again, turn by turn: %s", run, batch.manifest.step, error
        )
    payload = reader.read(members, run=run)
    turns = StoredTurns.of(itertools.chain.from_iterable([payload[m.key] for m in members]))
    try:
        return assemble(groups, turns, first_row_id=first_row_id)
    except (BatchingError, RecordError) as error:
        damages: list[Damage] = []
        for alone in (replace(g, trajectories=(m,)) for g in groups for m in g.trajectories):
            try:
                own = StoredTurns.of(payload[alone.trajectories[0].key])
                assemble([alone], own, first_row_id=0)
            except (BatchingError, RecordError) as own_error:
                damages.append(Damage(alone.trajectories[0].key, str(own_error)))
        if not damages:  # they fail only together
            damages = [Damage(member.key, str(error)) for member in members]
        raise DamagedPayloadError(tuple(damages)) from error


def cut_mini_batch(batch: PlannedBatch, rows: Rows, *, dp_world_size: int) -> Cut:
    """Return the shares of all ranks; BatchingError if the rows cannot be divided among them."""
    config, lengths = batch.config, rows.input_ids.lengths
    multiple_of = rows_multiple(
        dp_world_size=dp_world_size,
        mini_batch_rows=config.rows_multiple_of,
        passes_multiple_of=config.passes_multiple_of,
    )
    ranks = cut_ranks(
        lengths, dp_world_size=dp_world_size, multiple_of=multiple_of, budget=config.budget
    )
    passes = rank_passes(
        lengths, ranks, budget=config.budget, multiple_of=config.passes_multiple_of
    )
    return Cut(ranks=ranks, passes=passes)


def encode_share(
    batch: PlannedBatch, rows: Rows, cut: Cut, *, mini_batch: int, dp_rank: int
) -> EncodedMiniBatch:
    """Return one rank's share of a mini-batch, encoded; the same arguments give the same bytes."""
    share = take_share(
        rows,
        cut.ranks[dp_rank],
        step=batch.manifest.step,
        mini_batch=mini_batch,
        pad_token_id=batch.config.pad_token_id,
    )
    info = _info(batch, share, cut, mini_batch=mini_batch, dp_rank=dp_rank)
    return encode_mini_batch(MiniBatch(rows=share, info=info))


def _info(
    batch: PlannedBatch, share: Rows, cut: Cut, *, mini_batch: int, dp_rank: int
) -> MiniBatchInfo:
    manifest = batch.manifest
    plan = manifest.mini_batches[mini_batch]
    is_named = manifest.assembly_version >= _NAMES_AGGREGATION
    num_inert_rows = int(np.count_nonzero(share.is_padding))
    members = [member for group in batch.groups_of(mini_batch) for member in group.trajectories]
    totals = _totals(members, num_rows=plan.num_rows)
    width = max(plan.width, INERT_LENGTH)  # for all ranks, also those without an inert row
    oldest = [m.oldest_version for m in members if m.oldest_version is not None]
    newest = [m.newest_version for m in members if m.newest_version is not None]
    return MiniBatchInfo(
        run=manifest.run,
        step=manifest.step,
        revision=manifest.revision,
        lineage=manifest.lineage,
        mini_batch=mini_batch,
        num_mini_batches=len(manifest.mini_batches),
        manifest_hash=batch.manifest_hash,
        assembly_version=manifest.assembly_version,
        config_revision=manifest.config_revision,
        pad_token_id=batch.config.pad_token_id,
        alignment=batch.config.alignment,
        width=width,
        response_width=max(plan.response_width, INERT_RESPONSE_LENGTH),
        denominators=plan.denominators,
        aggregation=batch.config.aggregation if is_named else None,
        padding_share=1.0 - totals.num_tokens / (plan.num_rows * width),
        merge_ratio=totals.num_turn_tokens / totals.num_tokens,
        oldest_version=min(oldest, default=None),
        newest_version=max(newest, default=None),
        totals=totals if manifest.assembly_version >= _HAS_TOTALS else None,
        figures=manifest.figures if mini_batch == 0 else Figures(),
        dp_rank=dp_rank,
        dp_world_size=len(cut.ranks),
        num_real_rows=len(share) - num_inert_rows,
        num_inert_rows=num_inert_rows,
        micro_batches=tuple(map(tuple, cut.passes[dp_rank])),
    )


def _totals(members: Sequence[TrajectoryPlan], *, num_rows: int) -> MiniBatchTotals:
    return MiniBatchTotals(
        num_rows=num_rows,
        num_tokens=sum(row.num_tokens for member in members for row in member.sequences),
        num_turn_tokens=sum(member.num_turn_tokens for member in members),
        num_trajectories=len(members),
        reward_sum=math.fsum(member.reward for member in members),
    )


def num_bytes_of(value: Rows | Cut | EncodedMiniBatch) -> int:
    """Return the memory of a value in bytes, roughly: each row of a cut stands in two lists."""
    if isinstance(value, EncodedMiniBatch):
        return value.num_bytes
    if isinstance(value, Cut):
        num_lists = len(value.ranks) + sum(map(len, value.passes))
        return 100 * (num_lists + sum(map(len, value.ranks)))
    columns = [getattr(value, name) for name in Rows.__slots__]
    if value.operations is not None:
        columns += [getattr(value.operations, name) for name in OperationColumns.__slots__]
    total = 0
    for column in (*columns, *[extra.values for extra in value.extras.values()]):
        if isinstance(column, Ragged):
            total += column.values.nbytes + column.offsets.nbytes
        elif isinstance(column, np.ndarray):
            total += column.nbytes
    return total
