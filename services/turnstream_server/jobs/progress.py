"""The progress of a job: a bar and numbers on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from turnstream_server.jobs.summary import Summary

_LINE_EVERY_S = 10.0


def progress_lines(
    summary: Summary, *, elapsed_s: float, goal: float | None = None
) -> tuple[str, str]:
    """Return the numbers of a job, and its ledger; `goal` is the reward that ends the job."""
    minutes, seconds = divmod(int(elapsed_s), 60)
    last = summary.reward_last_tenth
    reward = "-" if last is None else f"{last:.3f}"
    reward += "" if goal is None else f" of {goal:.3f}"
    states = [f"{state} {count:,}" for state, count in summary.ledger.items()]
    pace = f"{summary.tokens_per_s:,.0f} tokens/s"
    return (
        f"{minutes}:{seconds:02}  step {summary.steps}  reward {reward}  {pace}",
        "ledger: " + (", ".join(states) or "empty"),
    )


class ProgressDisplay:
    """Shows the newest progress; a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._last_line_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def show(
        self, summary: Summary, *, share: float, elapsed_s: float, goal: float | None = None
    ) -> None:
        """Replace the display; without a terminal, print a line every ten seconds.

        `share` is the finished part of the work, 0 to 1, and `goal` the reward that ends the job.
        """
        lines = progress_lines(summary, elapsed_s=elapsed_s, goal=goal)
        if self._console.is_terminal:
            bar = ProgressBar(total=1.0, completed=min(1.0, max(0.0, share)), width=60)
            self._live.update(Group(bar, Text("\n".join(lines))), refresh=True)
        elif time.monotonic() - self._last_line_s >= _LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self._console.print("  ".join(lines), soft_wrap=True)
