"""Batches of a run: content, numbers, bytes and archive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from turnstream.store.client import keys
from turnstream.store.run.configs import open_run
from turnstream_server.batcher.assembly.archive import archive_step
from turnstream_server.batcher.assembly.assembler import assemble_batch, read_planned_batch
from turnstream_server.console.store_client import store_client
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.queries.batch_facts import BatchNumbers, batch_facts
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
        if content["mean_reward"] is not None:
            console.print(f"mean reward {content['mean_reward']:.3f}")
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


def read_batch(url: str, run: str, step: int) -> dict[str, Any]:
    """Return a batch in plain values; a released batch has names and checksums."""
    with store_client(url) as client:
        return batch_facts(client, open_run(client, run), step)


def archive_run(url: str, run: str, folder: Path) -> Iterator[Path]:
    """Write the committed steps that are still stored; yield each path when it is on disk."""
    with store_client(url) as client:
        run = open_run(client, run)
        frontier = read_frontier(client, run)
    for step in range(frontier.released + 1, frontier.committed + 1):
        yield archive_step(url, run, step, folder=folder)
