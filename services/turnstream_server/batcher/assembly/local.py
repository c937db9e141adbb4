"""Assembly of a planned batch in the calling process, for commands."""

from __future__ import annotations

import contextlib

from turnstream.errors import NotReadyError
from turnstream.records.batches import EncodedMiniBatch
from turnstream.records.configs import decode_config
from turnstream.store.client.connection import connect
from turnstream.store.run.configs import open_run, stored_config
from turnstream_server.batcher.assembly.payload import PayloadReader
from turnstream_server.batcher.assembly.shares import (
    PlannedBatch,
    build_rows,
    check_assembly_version,
    cut_mini_batch,
    encode_share,
)
from turnstream_server.bus.core.frontier import not_retained, read_frontier
from turnstream_server.bus.planning.manifests import read_plan


def assemble_batch(
    url: str, batch: PlannedBatch, *, dp_rank: int, dp_world_size: int
) -> list[EncodedMiniBatch]:
    """Return one rank's share of every mini-batch of a plan: the very bytes that a Get returns.

    Raises:
        DamagedPayloadError: payload of it is damaged.
        UnknownFormatError: the batch has the assembly rules of another release.
    """
    check_assembly_version(batch.manifest)
    shares: list[EncodedMiniBatch] = []
    with contextlib.closing(PayloadReader(url)) as reader:
        for index in range(len(batch.manifest.mini_batches)):
            rows = build_rows(batch, reader, mini_batch=index)
            cut = cut_mini_batch(batch, rows, dp_world_size=dp_world_size)
            shares.append(encode_share(batch, rows, cut, mini_batch=index, dp_rank=dp_rank))
    return shares


def read_planned_batch(url: str, run: str, step: int) -> PlannedBatch:
    """Return the plan of a step with the config that it was made under.

    Raises:
        ReleasedError: the step is no longer retained.
        NotReadyError: the step is not planned yet.
    """
    with connect(url) as client:
        run = open_run(client, run)
        frontier = read_frontier(client, run)
        if step <= frontier.released:
            raise not_retained(step, frontier)
        stored = read_plan(client, run, step)
        if stored is None:
            raise NotReadyError(f"run {run!r}: step {step} is not planned; {frontier.planned} are")
        text = stored_config(client, run, stored.manifest.config_revision)
    config = decode_config(text, run=run)
    return PlannedBatch(manifest=stored.manifest, manifest_hash=stored.hash, config=config)
