"""The newest steps as a table on a terminal."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from turnstream_server.logs import log_to
from turnstream_server.screen import make_table

COLUMNS: Final = {
    "step": "step",
    "reward_mean": "reward",
    "loss": "loss",
    "kl": "KL",
    "clipped_share": "clipped",
    "staleness": "stale",
    "padding_share": "padding",
    "trained_tokens_per_s": "tokens/s",
    "wait_s": "wait s",
    "step_s": "step s",
}
"""Title of the column of each metric that is shown."""

NUM_STEPS: Final = 10

_LOOK: Final[dict[str, Any]] = {"box": SIMPLE_HEAD, "padding": 0}
"""Without borders, so that the columns fit into 80 characters."""


class LiveTable:
    """Shows the last ten steps of a run in place; lines of the log appear above the table.

    The last table stays when it is closed.
    """

    def __init__(self, console: Console, *, run: str) -> None:
        self._run = run
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=NUM_STEPS)
        self._opened = ExitStack()
        self._live = self._opened.enter_context(Live(console=console, auto_refresh=False))
        self._opened.enter_context(log_to(sys.stderr))  # which `Live` has replaced

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the step, in place of the oldest one."""
        self._steps.append(metrics)
        self._live.update(steps_table(self._run, self._steps), refresh=True)

    def close(self) -> None:
        """End the display, and send the log where it went before."""
        self._opened.close()


def steps_table(run: str, steps: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each step."""
    rows = [[short(metrics.get(name)) for name in COLUMNS] for metrics in steps]
    table = make_table([*COLUMNS.values()], rows, title=run, title_justify="left", **_LOOK)
    for column in table.columns:
        column.justify = "right"
    return table


def short(value: float | None) -> str:
    """Return a number with three digits, or more before its point; "" for None.

    >>> [short(each) for each in (12, 12_345.6, 0.012345, -0.5, None)]
    ['12', '12,346', '0.0123', '-0.5', '']
    """
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1_000 else f"{value:.3g}"
