"""Results of the evaluations of a run, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from turnstream.records.tag_statistics import shown_figures
from turnstream.store.run.evals import eval_results
from turnstream.types import EvalGroup, EvalResult, Spread
from turnstream_server.jobs.screen import print_figures
from turnstream_server.jobs.store_client import store_client


def read_evals(url: str, run: str) -> list[dict[str, Any]]:
    """Return the results of every version in plain values, with the groups that are kept."""
    with store_client(url) as client:
        return [_content(each) for each in eval_results(client, run)]


def print_evals(run: str, results: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a line for each version of the weights, and tags and metrics of the newest."""
    columns = ("version", "groups", "trajectories", "lost", "mean reward", "std", "best of n")
    table = Table(*columns, title=f"evaluations of {run}")
    for each in results:
        reward, best = each["reward"], each["best"]
        table.add_row(
            "unknown" if each["version"] is None else str(each["version"]),
            f"{each['num_groups']:,}",
            f"{each['num_trajectories']:,}",
            f"{each['num_lost']:,}",
            *((f"{reward['mean']:g}", f"{reward['std']:g}") if reward else ("", "")),
            f"{best['mean']:g}" if best else "",
        )
    console.print(table)
    if results and results[-1]["figures"]:
        console.print(f"version {results[-1]['version']}:")
        print_figures(results[-1]["figures"], console)


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
