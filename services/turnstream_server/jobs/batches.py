"""Batches of a run: content, numbers, bytes and archive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from turnstream.batching.merge.plan import Manifest, MiniBatchPlan
from turnstream.errors import NotReadyError, ReleasedError
from turnstream.records.compact import CompactBatch
from turnstream.records.tag_statistics import shown_figures
from turnstream.store.client import keys
from turnstream.store.run.configs import open_run
from turnstream_server.batcher.assembly.archive import archive_step
from turnstream_server.batcher.assembly.assembler import assemble_batch, read_planned_batch
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.bus.planning.manifests import StoredManifest, read_plan
from turnstream_server.bus.queries.ledger import state_of_step
from turnstream_server.bus.release.compact_records import read_past_batch
from turnstream_server.jobs.store_client import store_client
from turnstream_server.jobs.summary import BatchNumbers, numbers_of
from turnstream_server.screen import facts_table, make_table, print_figures

MAX_SHOWN: Final = 12
"""Trajectories of a batch that are printed; more do not fit one screen."""


def print_batch(run: str, content: dict[str, Any], console: Console, *, show_all: bool) -> None:
    """Print sizes of a batch, its first trajectories with reward and advantage, and denominators.

    `content` is from `read_batch`.
    """
    step = content["step"]
    console.print(f"step {step} of {run}: {content['state']}, {content['manifest_hash']}")
    if content.get("revision"):
        console.print("planned again, because payload of an earlier plan was damaged")
    if "trajectories" in content:
        names = ", ".join(keys.readable_name(each["id"]) for each in content["trajectories"])
        console.print(f"no longer retained; of its trajectories the names are kept: {names}")
    if "numbers" in content:
        console.print(facts_table(BatchNumbers(**content["numbers"]).rows()))
    _print_trajectories(content["mini_batches"], console, most=None if show_all else MAX_SHOWN)
    if show_all:
        print_figures(content.get("figures"), console)


def _print_trajectories(
    mini_batches: Sequence[Mapping[str, Any]], console: Console, *, most: int | None
) -> None:
    """Print the trajectories, and what the loss of each mini-batch is divided by."""
    members = [
        (index, each) for index, cut in enumerate(mini_batches) for each in cut["trajectories"]
    ]
    if not members:
        return
    rows = [
        (
            *(index, each["reward"], each["advantage"], each["num_rows"]),
            keys.readable_name(each["id"]),
        )
        for index, each in members[:most]
    ]
    columns = ("mini-batch", "reward", "advantage", "rows", "trajectory")
    console.print(make_table(columns, rows, box=None))
    if most is not None and len(members) > most:
        console.print(f"and {len(members) - most:,} others: --all prints them, tags and metrics")
    for index, cut in enumerate(mini_batches[: None if most is None else 4]):
        values = ", ".join(f"{name} {value:g}" for name, value in cut["denominators"].items())
        console.print(f"mini-batch {index}: {values}", soft_wrap=True)


def write_batch(
    url: str, run: str, step: int, path: Path, *, dp_rank: int, dp_world_size: int
) -> list[Path]:
    """Write the exact bytes of every mini-batch of one rank, as Arrow IPC streams.

    One mini-batch is written to `path` itself; a second one is written to `<stem>-1<suffix>`, ...
    """
    batch = read_planned_batch(url, run, step)
    shares = assemble_batch(url, batch, dp_rank=dp_rank, dp_world_size=dp_world_size)
    paths: list[Path] = []
    for index, share in enumerate(shares):
        target = path.with_stem(f"{path.stem}-{index}") if index else path
        draft = target.with_name(f".{target.name}.draft")
        draft.write_bytes(share.data)
        draft.replace(target)
        paths.append(target)
    return paths


def read_batch(url: str, run: str, step: int, *, folder: Path | None = None) -> dict[str, Any]:
    """Return a batch in plain values; a released batch has names and checksums."""
    with store_client(url) as client:
        run = open_run(client, run)
        frontier = read_frontier(client, run)
        stored = read_plan(client, run, step)
        past = None if stored else read_past_batch(client, run, step, folder=folder)
    if stored is not None:
        return {"state": state_of_step(step, frontier).value, **_content(stored)}
    if past is not None:
        return {"state": state_of_step(step, frontier).value, **_past_content(run, past)}
    origin = frontier.origin
    if origin is not None and step <= origin.step:
        raise ReleasedError(
            f"run {run!r}: step {step} was trained by its origin; see the batch in {origin.run!r}"
        )
    raise NotReadyError(f"run {run!r}: step {step} is not planned; {frontier.planned} are")


def _past_content(run: str, past: CompactBatch) -> dict[str, Any]:
    return {
        "run": run,
        "step": past.step,
        "manifest_hash": past.manifest_hash,
        "lineage": past.lineage,
        "trajectories": [
            {"id": keys.trajectory_id(key), "crc": f"{crc:08x}"}
            for key, crc in zip(past.trajectories, past.crcs, strict=True)
        ],
        "mini_batches": [],
    }


def _content(stored: StoredManifest) -> dict[str, Any]:
    manifest = stored.manifest
    return {
        "run": manifest.run,
        "step": manifest.step,
        "revision": manifest.revision,
        "manifest_hash": stored.hash,
        "previous_hash": manifest.previous_hash,
        "lineage": manifest.lineage,
        "config_revision": manifest.config_revision,
        "numbers": asdict(numbers_of(manifest)),
        "figures": shown_figures(manifest.figures),
        "mini_batches": [_mini_batch(manifest, each) for each in manifest.mini_batches],
    }


def _mini_batch(manifest: Manifest, cut: MiniBatchPlan) -> dict[str, Any]:
    groups = manifest.groups[cut.first_group : cut.first_group + cut.num_groups]
    return {
        "denominators": cut.denominators._asdict(),
        "num_rows": cut.num_rows,
        "first_row_id": cut.first_row_id,
        "trajectories": [
            {
                "id": keys.trajectory_id(member.key),
                "prompt_uid": group.prompt_uid,
                "status": member.status.value,
                "reward": member.reward,
                "advantage": member.advantage,
                "turn_advantages": list(member.turn_advantages),
                "weights": list(member.weights),
                "num_rows": len(member.sequences),
            }
            for group in groups
            for member in group.trajectories
        ],
    }


def archive_run(url: str, run: str, folder: Path) -> Iterator[Path]:
    """Write the committed steps that are still stored; yield each path when it is on disk."""
    with store_client(url) as client:
        run = open_run(client, run)
        frontier = read_frontier(client, run)
    for step in range(frontier.released + 1, frontier.committed + 1):
        yield archive_step(url, run, step, folder=folder)
