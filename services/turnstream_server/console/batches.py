"""Batches of a run: content, numbers, bytes and archive, and how turns merge into rows.

The report of a merge has the first mismatch of each trajectory that breaks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from turnstream.batching.merge.merging import turn_prompts
from turnstream.batching.planning.report import MergeBreak, merge_breaks, merge_counts
from turnstream.store.client import keys
from turnstream.store.run.configs import open_run
from turnstream.types import StoredTurn
from turnstream_server.batcher.assembly.archive import archive_step
from turnstream_server.batcher.assembly.assembler import assemble_batch, read_planned_batch
from turnstream_server.batcher.assembly.payload import PayloadReader
from turnstream_server.console.store_client import store_client
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.queries.run_facts import BatchNumbers, batch_facts
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


TOKENS_AROUND: Final = 4
"""Token ids shown on each side of a difference."""


def print_merge(found: dict[str, Any], console: Console) -> None:
    """Print the merge report of a batch, from `read_merge`."""
    merge = "merge" if found["merge"] else "would merge, but for merge=False,"
    console.print(
        f"step {found['step']} of {found['run']}: {found['num_turns']} turns of "
        f"{found['num_trajectories']} trajectories {merge} into {found['num_rows']} rows, "
        f"{found['num_turn_tokens']} tokens into {found['num_row_tokens']}: "
        f"{found['merge_ratio']:.2f} to 1"
    )
    if not found["breaks"]:
        console.print("no trajectory breaks")
        return
    rows = [
        (
            keys.readable_name(each["trajectory"]),
            each["turn"],
            f"turn {each['compared_with']}",
            str(each["position"]),
            _shown(each["expected_around"], each, ended="its end"),
            _shown(each["found_around"], each, ended="the end of the prompt"),
        )
        for each in found["breaks"]
    ]
    columns = ("trajectory", "turn", "differs from", "at token", "which has", "for")
    console.print(make_table(columns, rows, title="breaks"))


def read_merge(url: str, run: str, step: int) -> dict[str, Any]:
    """Return the merge report of a batch in plain values.

    `expected_around` and `found_around` of a break are token ids from `around_from` on. The first
    are in the turn that its prompt should continue, the others in that prompt. Those at `position`
    differ.
    """
    batch = read_planned_batch(url, run, step)
    members = [member for group in batch.manifest.groups for member in group.trajectories]
    left_out = {member.key: member.left_out for member in members}
    with contextlib.closing(PayloadReader(url)) as reader:
        payload = reader.read(members, run=batch.manifest.run)
    return {
        "run": run,
        "step": step,
        "merge": batch.config.merge,
        **merge_counts(payload, left_out),
        "breaks": [_break(found, payload[found.key]) for found in merge_breaks(payload, left_out)],
    }


def _break(found: MergeBreak, stored: Sequence[StoredTurn]) -> dict[str, Any]:
    prompts = turn_prompts(stored)
    left = np.concatenate((prompts[found.compared_with], stored[found.compared_with].response_ids))
    start, stop = max(0, found.position - TOKENS_AROUND), found.position + TOKENS_AROUND + 1
    values = found._asdict()
    return {
        "trajectory": keys.trajectory_id(values.pop("key")),
        **values,
        "expected": _token_at(left, found.position),
        "found": _token_at(prompts[found.turn], found.position),
        "around_from": start,
        "expected_around": left[start:stop].tolist(),
        "found_around": prompts[found.turn][start:stop].tolist(),
    }


def _token_at(token_ids: NDArray[np.int32], position: int) -> int | None:
    return int(token_ids[position]) if position < len(token_ids) else None


def _shown(token_ids: Sequence[int], found: dict[str, Any], *, ended: str) -> str:
    """Return the tokens as text, with the one that differs in brackets.

    >>> _shown([5, 6, 7], {"position": 3, "around_from": 2}, ended="its end")
    '5 [6] 7'
    >>> _shown([5], {"position": 3, "around_from": 2}, ended="its end")
    '5 [its end]'
    """
    at = found["position"] - found["around_from"]
    words = [*map(str, token_ids)] if at < len(token_ids) else [*map(str, token_ids), ended]
    return " ".join([*words[:at], f"[{words[at]}]", *words[at + 1 :]])
