"""One rank's share of a mini-batch: a pure function of the manifest, its rows and the rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from turnstream.batching.config import BatchingConfig
from turnstream.batching.merge.plan import GroupPlan, Manifest
from turnstream.batching.packing.bins import Bins
from turnstream.batching.rows.minibatch import cut_ranks, rank_passes, rows_multiple, take_share
from turnstream.batching.rows.plain_rows import INERT_LENGTH, INERT_RESPONSE_LENGTH
from turnstream.records.batches import EncodedMiniBatch, encode_mini_batch
from turnstream.types import Figures, MiniBatch, MiniBatchInfo, Rows

Passes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A manifest, what it is called, and the configuration that it was made under."""

    manifest: Manifest
    manifest_hash: str
    config: BatchingConfig

    def groups_of(self, mini_batch: int) -> tuple[GroupPlan, ...]:
        """The groups of one optimizer update, in order."""
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

    @property
    def dp_world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def num_bytes(self) -> int:
        """Upper estimate of the memory in use: every row stands in both lists."""
        num_rows = sum(map(len, self.ranks))
        num_lists = sum(map(len, self.passes)) + 2 * len(self.ranks)
        return num_rows * 2 * _BYTES_PER_NUMBER + num_lists * _BYTES_PER_LIST


_BYTES_PER_NUMBER: Final = 40
"""In a list: 8 of the pointer, 28 of the number, rounded up."""

_BYTES_PER_LIST: Final = 96


def cut_mini_batch(batch: PlannedBatch, rows: Rows, *, dp_world_size: int) -> Cut:
    """Return the shares of all ranks. One cut serves every rank.

    Args:
        batch: the plan.
        rows: all rows of one of its mini-batches.
        dp_world_size: number of ranks.

    Raises:
        BatchingError: the rows cannot be divided among so many ranks.
    """
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
    """Return one rank's share, encoded; the same arguments give the same bytes.

    Args:
        batch: the plan.
        rows: all rows of this mini-batch.
        cut: division of these rows among all ranks.
        mini_batch: its index.
        dp_rank: whose share.
    """
    share = take_share(
        rows,
        cut.ranks[dp_rank],
        step=batch.manifest.step,
        mini_batch=mini_batch,
        pad_token_id=batch.config.pad_token_id,
    )
    num_inert_rows = int(np.count_nonzero(share.is_padding))
    info = _info(
        batch,
        mini_batch=mini_batch,
        dp_rank=dp_rank,
        dp_world_size=cut.dp_world_size,
        num_real_rows=len(share) - num_inert_rows,
        num_inert_rows=num_inert_rows,
        passes=tuple(map(tuple, cut.passes[dp_rank])),
    )
    return encode_mini_batch(MiniBatch(rows=share, info=info))


def _info(
    batch: PlannedBatch,
    *,
    mini_batch: int,
    dp_rank: int,
    dp_world_size: int,
    num_real_rows: int,
    num_inert_rows: int,
    passes: Passes,
) -> MiniBatchInfo:
    manifest = batch.manifest
    plan = manifest.mini_batches[mini_batch]
    members = [member for group in batch.groups_of(mini_batch) for member in group.trajectories]
    num_tokens = sum(row.num_tokens for member in members for row in member.sequences)
    width = max(plan.width, INERT_LENGTH)  # for all ranks, also those without an inert row
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
        padding_share=1.0 - num_tokens / (plan.num_rows * width),
        merge_ratio=sum(member.num_turn_tokens for member in members) / num_tokens,
        oldest_version=min(
            (m.oldest_version for m in members if m.oldest_version is not None), default=None
        ),
        newest_version=max(
            (m.newest_version for m in members if m.newest_version is not None), default=None
        ),
        figures=manifest.figures if mini_batch == 0 else Figures(),
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        num_real_rows=num_real_rows,
        num_inert_rows=num_inert_rows,
        micro_batches=passes,
    )
