"""Merge ratio of one batch, and the first mismatch of each trajectory that breaks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from turnstream.batching.merge.merging import turn_prompts
from turnstream.batching.planning.report import MergeBreak, merge_breaks, merge_counts
from turnstream.store.client import keys
from turnstream.types import StoredTurn
from turnstream_server.batcher.assembly.assembler import read_planned_batch
from turnstream_server.batcher.assembly.payload import PayloadReader
from turnstream_server.screen import make_table

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
    with contextlib.closing(PayloadReader(url)) as reader:
        payload = reader.read(members, run=batch.manifest.run)
    return {
        "run": run,
        "step": step,
        "merge": batch.config.merge,
        **merge_counts(payload),
        "breaks": [_break(found, payload[found.key]) for found in merge_breaks(payload)],
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
