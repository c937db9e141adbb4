"""Results of the evaluations of a run, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from turnstream.records.tag_statistics import shown_figures
from turnstream.store.run.evals import eval_results
from turnstream.types import EvalGroup, EvalResult, Spread
from turnstream_server.console.store_client import store_client
from turnstream_server.screen import make_table, print_figures

_NONE = {"mean": None, "std": None}


def read_evals(url: str, run: str) -> list[dict[str, Any]]:
    """Return the results of every version in plain values, with the groups that are kept."""
    with store_client(url) as client:
        return [
            {
                **_facts(result, "version", "num_groups"),
                "best": _spread(result.best),
                "figures": shown_figures(result.figures),
                "groups": [
                    {**_facts(group, "group_id", "prompt_uid"), "best": group.best}
                    for group in result.groups
                ],
            }
            for result in eval_results(client, run)
        ]


def print_evals(run: str, results: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a line for each version of the weights, and tags and metrics of the newest."""
    columns = ("version", "groups", "trajectories", "lost", "mean reward", "std", "best of n")
    rows = [
        (
            "unknown" if each["version"] is None else str(each["version"]),
            *(each["num_groups"], each["num_trajectories"], each["num_lost"]),
            *((each["reward"] or _NONE)[name] for name in ("mean", "std")),
            (each["best"] or _NONE)["mean"],
        )
        for each in results
    ]
    console.print(make_table(columns, rows, title=f"evaluations of {run}"))
    if results and results[-1]["figures"]:
        console.print(f"version {results[-1]['version']}:")
        print_figures(results[-1]["figures"], console)


def _facts(found: EvalResult | EvalGroup, *names: str) -> dict[str, Any]:
    """Return these fields, the numbers of trajectories and the rewards."""
    values = {name: getattr(found, name) for name in (*names, "num_trajectories", "num_lost")}
    return {**values, "reward": _spread(found.reward)}


def _spread(spread: Spread) -> dict[str, Any] | None:
    return {"num": spread.num, "mean": spread.mean, "std": spread.std} if spread.num else None
