"""Tags and metrics of many trajectories, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_figures(figures: Mapping[str, Any] | None, console: Console) -> None:
    """A table of metrics and one of tags, where there are any; of what `shown_figures` gave."""
    if figures is None:
        return
    if figures["metrics"]:
        table = Table("metric", "trajectories", "mean", "minimum", "maximum")
        for name, each in figures["metrics"].items():
            numbers = [f"{each[part]:g}" for part in ("mean", "minimum", "maximum")]
            table.add_row(name, f"{each['num_trajectories']:,}", *numbers)
        console.print(table)
    if figures["tags"]:
        table = Table("tag", "value", "trajectories", "mean reward")
        for name, tag in figures["tags"].items():
            for text, each in tag["values"].items():
                table.add_row(name, text, *_row(each))
            if tag["other"] is not None:
                table.add_row(name, "(any other value)", *_row(tag["other"]))
        console.print(table)
    if figures["num_left_out"]:
        console.print(f"{figures['num_left_out']:,} tags and metrics are not shown")


def _row(value: Mapping[str, Any]) -> tuple[str, str]:
    mean = value["reward_mean"]
    return f"{value['num_trajectories']:,}", "" if mean is None else f"{mean:g}"
