"""The rows of a planned mini-batch, made from its payload."""

from __future__ import annotations

import functools

import numpy as np

from turnstream.batching.merge.plan import ASSEMBLY_VERSION, GroupPlan, Manifest
from turnstream.batching.rows.assemble import assemble_rows
from turnstream.errors import BatchingError, RecordError, UnknownFormatError
from turnstream.types import Ragged, Rows
from turnstream_server.batcher.assembly.payload import Damage, DamagedPayloadError, PayloadReader
from turnstream_server.batcher.assembly.shares import PlannedBatch


def check_assembly_version(manifest: Manifest) -> None:
    """Refuse a plan that a newer release assembles by other rules.

    Raises:
        UnknownFormatError: names both versions.
    """
    if manifest.assembly_version > ASSEMBLY_VERSION:
        raise UnknownFormatError("assembly", manifest.assembly_version, ASSEMBLY_VERSION)


def build_rows(batch: PlannedBatch, reader: PayloadReader, *, mini_batch: int) -> Rows:
    """Return all rows of a mini-batch.

    Raises:
        DamagedPayloadError: names the trajectories that cannot be assembled.
    """
    groups = batch.groups_of(mini_batch)
    members = [member for group in groups for member in group.trajectories]
    payload = reader.read(members, run=batch.manifest.run)
    assemble = functools.partial(
        assemble_rows,
        payload=payload,
        extra_columns=batch.config.extra_columns,
        masked_versions=batch.manifest.masked_versions,
    )
    try:
        return assemble(groups, first_row_id=batch.manifest.mini_batches[mini_batch].first_row_id)
    except (BatchingError, RecordError) as error:
        damages: list[Damage] = []
        for group in groups:
            for member in group.trajectories:
                alone = GroupPlan(
                    group_id=group.group_id, prompt_uid=group.prompt_uid, trajectories=(member,)
                )
                try:
                    assemble([alone], first_row_id=0)
                except (BatchingError, RecordError) as own_error:
                    damages.append(Damage(member.key, str(own_error)))
        if not damages:  # they fail only together
            damages = [Damage(member.key, str(error)) for member in members]
        raise DamagedPayloadError(tuple(damages)) from error


def num_bytes_of(rows: Rows) -> int:
    """Return the memory of rows, in bytes."""
    total = 0
    columns = [getattr(rows, name) for name in Rows.__slots__]
    for column in (*columns, *[extra.values for extra in rows.extras.values()]):
        if isinstance(column, Ragged):
            total += column.values.nbytes + column.offsets.nbytes
        elif isinstance(column, np.ndarray):
            total += column.nbytes
    return total
