"""Results of the evaluations of a run, for people and for programs."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from turnstream.records.tag_statistics import shown_figures
from turnstream.store.run.evals import eval_results
from turnstream.types import EvalGroup, EvalResult, Spread
from turnstream_server.jobs.screen import print_figures
from turnstream_server.jobs.store_client import store_client


def print_evals(url: str, run: str, console: Console) -> None:
    """A line for each version of the weights, and tags and metrics of the newest."""
    results = _read(url, run)
    columns = ("version", "groups", "trajectories", "lost", "mean reward", "std", "best of n")
    table = Table(*columns, title=f"evaluations of {run}")
    for each in results:
        table.add_row(
            "unknown" if each.version is None else str(each.version),
            f"{each.num_groups:,}",
            f"{each.num_trajectories:,}",
            f"{each.num_lost:,}",
            *((f"{each.reward.mean:g}", f"{each.reward.std:g}") if each.reward.num else ("", "")),
            f"{each.best.mean:g}" if each.best.num else "",
        )
    console.print(table)
    if results and results[-1].figures:
        console.print(f"version {results[-1].version}:")
        print_figures(shown_figures(results[-1].figures), console)


def evals_json(url: str, run: str) -> str:
    """Return the same as JSON, of all versions, with the groups that are kept one by one."""
    return json.dumps([_content(each) for each in _read(url, run)], indent=2)


def _read(url: str, run: str) -> list[EvalResult]:
    with store_client(url) as client:
        return eval_results(client, run)


def _content(result: EvalResult) -> dict[str, Any]:
    return {
        "version": result.version,
        "num_groups": result.num_groups,
        "num_trajectories": result.num_trajectories,
        "num_lost": result.num_lost,
        "reward": _spread(result.reward),
        "best": _spread(result.best),
        "figures": shown_figures(result.figures),
        "groups": [_group(each) for each in result.groups],
    }


def _group(group: EvalGroup) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "prompt_uid": group.prompt_uid,
        "num_trajectories": group.num_trajectories,
        "num_lost": group.num_lost,
        "reward": _spread(group.reward),
        "best": group.best,
    }


def _spread(spread: Spread) -> dict[str, Any] | None:
    return {"num": spread.num, "mean": spread.mean, "std": spread.std} if spread.num else None
