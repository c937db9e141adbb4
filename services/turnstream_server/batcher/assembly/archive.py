"""The archive of trained steps, for pandas, polars and DuckDB: one Parquet file per step."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from turnstream.batching.merge.plan import Manifest
from turnstream.errors import RecordError
from turnstream.records.batches import COLUMNS, EncodedMiniBatch
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.types import SealedTrajectory
from turnstream.types.names import file_name
from turnstream_server.batcher.assembly.assembler import assemble_batch, read_planned_batch
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.planning.trajectories import read_seals

ROW_GROUP_ROWS: Final = 4_096
"""Rows that a reader unpacks at once; with tens of thousands of tokens a row that is hundreds of
megabytes already."""

_FLOATS: Final = pa.list_(pa.field("item", pa.float32(), nullable=False))
_LABELS: Final = {"tags": pa.string(), "metrics": pa.float64()}


def archive_path(folder: Path, run: str, step: int) -> Path:
    """Return the file of a step of a run.

    >>> archive_path(Path("archive"), "a/b", 17).as_posix()
    'archive/a%2Fb/step-00000017.parquet'
    >>> archive_path(Path("archive"), "..", 17).as_posix()
    'archive/%2E%2E/step-00000017.parquet'
    """
    return folder / file_name(run) / f"step-{step:08d}.parquet"


def archive_step(url: str, run: str, step: int, *, folder: Path) -> Path:
    """Write the rows of a step, the way one rank alone would get them, unless they are there.

    A column `mini_batch` tells the optimizer updates apart. `rewards` is as long as the response in
    every row. So is `logprobs`, or null where no row of the mini-batch has any, and `advantages`,
    or null where `advantage` is that of every trained token. `token_weights` are null where every
    trained token weighs 1. The maps `tags` and `metrics` are those of the row's trajectory, null
    where its seal cannot be read. The file appears whole or not at all, and is on disk when this
    returns. Its metadata name run, step, lineage and manifest hash.
    """
    batch = read_planned_batch(url, run, step)
    path = archive_path(folder, run, step)
    if not _is_archived(path, manifest_hash=batch.manifest_hash):
        file = pa.BufferOutputStream()
        pq.write_table(_table(url, batch), file, compression="zstd", row_group_size=ROW_GROUP_ROWS)
        _write(path, memoryview(file.getvalue()))
    return path


def _is_archived(path: Path, *, manifest_hash: str) -> bool:
    """Return whether the file holds this batch, and not that of an earlier run of the same name."""
    if not path.is_file():
        return False
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError):
        return False
    return metadata.get(b"manifest_hash") == manifest_hash.encode()


def _write(path: Path, content: memoryview) -> None:
    """Write a file, and remove drafts of it that a killed process left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*.draft"):
        leftover.unlink(missing_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        failpoint("archive.before_rename")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    for changed in (path.parent, path.parent.parent):
        descriptor = os.open(changed, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # keeps the names in the folder
        finally:
            os.close(descriptor)


def _table(url: str, batch: PlannedBatch) -> pa.Table:
    shares = assemble_batch(url, batch, dp_rank=0, dp_world_size=1)
    tables = [_rows_of(share, mini_batch=index) for index, share in enumerate(shares)]
    manifest = batch.manifest
    rows = _with_labels(url, batch, pa.concat_tables(tables, promote_options="default"))
    return rows.replace_schema_metadata(
        {
            "run": manifest.run,
            "step": str(manifest.step),
            "lineage": manifest.lineage,
            "manifest_hash": batch.manifest_hash,
        }
    )


def _rows_of(share: EncodedMiniBatch, *, mini_batch: int) -> pa.Table:
    """Return the real rows of a mini-batch, with the columns that a share omits."""
    table = pa.ipc.open_stream(share.data).read_all()
    table = table.filter(~pc.field("is_padding")).drop_columns("is_padding")
    columns = dict(zip(table.column_names, table.columns, strict=True))
    columns.setdefault("rewards", _zeros_like(columns["loss_mask"]))
    for name in ("logprobs", "advantages", "token_weights"):
        columns.setdefault(name, pa.nulls(len(table), _FLOATS))
    columns["mini_batch"] = pa.array([mini_batch] * len(table), pa.int32())
    first = [name for name in ("mini_batch", *COLUMNS) if name in columns]
    order = [*first, *(name for name in columns if name not in first)]
    return pa.table({name: columns[name] for name in order})


def _zeros_like(lists: pa.ChunkedArray) -> pa.ListArray:
    ends = np.cumsum(pc.call_function("list_value_length", [lists]).to_numpy(), dtype=np.int32)
    offsets = pa.array(np.concatenate([[0], ends]), pa.int32())
    zeros = pa.array(np.zeros(ends[-1] if len(ends) else 0, np.float32))
    return pa.ListArray.from_arrays(offsets, zeros, _FLOATS)


def _with_labels(url: str, batch: PlannedBatch, table: pa.Table) -> pa.Table:
    seals = asyncio.run(_read_seals(url, batch.manifest))
    own = [seals.get(name) for name in table["trajectory_id"].to_pylist()]
    for name, kind in _LABELS.items():
        values: list[Any] = [
            [*getattr(seal, name).items()] if isinstance(seal, SealedTrajectory) else None
            for seal in own
        ]
        table = table.append_column(name, pa.array(values, pa.map_(pa.string(), kind)))
    return table


async def _read_seals(url: str, manifest: Manifest) -> dict[str, SealedTrajectory | RecordError]:
    members = [plan.key for group in manifest.groups for plan in group.trajectories]
    async with connect_async(url) as client:
        seals = await read_seals(client, manifest.run, members)
    return {keys.trajectory_id(key): seal for key, seal in seals.items()}
