"""Merge ratio of one batch, and the first mismatch of each trajectory that breaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from turnstream.batching.merge.merging import turn_prompts
from turnstream.batching.planning.report import MergeBreak, merge_report
from turnstream.store.client import keys
from turnstream.types import StoredTurn
from turnstream_server.batcher.assembly.local import read_batch_payload, read_planned_batch

TOKENS_BEFORE: Final = 4
TOKENS_BEHIND: Final = 4
"""Token ids shown on both sides of a difference."""


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
    table = Table("trajectory", "turn", "leaves", "at token", "which has", "for", title="breaks")
    for each in found["breaks"]:
        table.add_row(
            keys.readable_name(each["trajectory"]),
            str(each["turn"]),
            f"turn {each['compared_with']}",
            str(each["position"]),
            _shown(each["expected_around"], each, ended="its end"),
            _shown(each["found_around"], each, ended="the end of the prompt"),
        )
    console.print(table)


def read_merge(url: str, run: str, step: int) -> dict[str, Any]:
    """Return the merge report of a batch in plain values.

    `expected_around` and `found_around` of a break are token ids of the turn that its prompt leaves
    and of that prompt, from `around_from` on; those at `position` are the first that differ.
    """
    batch = read_planned_batch(url, run, step)
    payload = read_batch_payload(url, batch)
    report = merge_report(payload)
    return {
        "run": run,
        "step": step,
        "merge": batch.config.merge,
        "num_trajectories": report.num_trajectories,
        "num_turns": report.num_turns,
        "num_rows": report.num_rows,
        "num_turn_tokens": report.num_turn_tokens,
        "num_row_tokens": report.num_row_tokens,
        "merge_ratio": report.merge_ratio,
        "breaks": [_break(found, payload[found.key]) for found in report.breaks],
    }


def _break(found: MergeBreak, stored: Sequence[StoredTurn]) -> dict[str, Any]:
    prompts = turn_prompts(stored)
    left = np.concatenate((prompts[found.compared_with], stored[found.compared_with].response_ids))
    return {
        "trajectory": keys.trajectory_id(found.key),
        "turn": found.turn,
        "compared_with": found.compared_with,
        "position": found.position,
        "expected": found.expected,
        "found": found.found,
        "around_from": max(0, found.position - TOKENS_BEFORE),
        "expected_around": _around(left, found.position),
        "found_around": _around(prompts[found.turn], found.position),
    }


def _around(token_ids: NDArray[np.int32], position: int) -> list[int]:
    return token_ids[max(0, position - TOKENS_BEFORE) : position + TOKENS_BEHIND + 1].tolist()


def _shown(token_ids: Sequence[int], found: dict[str, Any], *, ended: str) -> str:
    """The tokens, with the one that differs in brackets.

    >>> _shown([5, 6, 7], {"position": 3, "around_from": 2}, ended="its end")
    '5 [6] 7'
    >>> _shown([5], {"position": 3, "around_from": 2}, ended="its end")
    '5 [its end]'
    """
    at = found["position"] - found["around_from"]
    words = [*map(str, token_ids)] if at < len(token_ids) else [*map(str, token_ids), ended]
    return " ".join([*words[:at], f"[{words[at]}]", *words[at + 1 :]])
