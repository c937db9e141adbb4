"""The progress of a job: a bar and figures on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from turnstream_server.jobs.summary import Summary

_LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """The progress of a job at one time.

    Attributes:
        share: finished part of the work, 0 to 1.
        elapsed_s: since the start of the job.
        summary: the statistics so far.
        goal: reward that ends the job; None without one.
    """

    share: float
    elapsed_s: float
    summary: Summary
    goal: float | None = None

    def lines(self) -> tuple[str, str]:
        """The figures, and the ledger."""
        minutes, seconds = divmod(int(self.elapsed_s), 60)
        last = self.summary.reward_last_tenth
        reward = "-" if last is None else f"{last:.3f}"
        goal = "" if self.goal is None else f" of {self.goal:.3f}"
        states = [f"{state} {count:,}" for state, count in self.summary.ledger.items()]
        pace = f"{self.summary.tokens_per_s:,.0f} tokens/s"
        return (
            f"{minutes}:{seconds:02}  step {self.summary.steps}  reward {reward}{goal}  {pace}",
            "ledger: " + (", ".join(states) or "empty"),
        )


class ProgressDisplay:
    """Shows one view after the other; a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._last_line_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, view: ProgressView) -> None:
        """Replace what is shown; without a terminal, print a line every ten seconds."""
        if self._console.is_terminal:
            bar = ProgressBar(total=1.0, completed=min(1.0, max(0.0, view.share)), width=60)
            lines = Text("\n".join(view.lines()))
            self._live.update(Group(bar, lines), refresh=True)
        elif time.monotonic() - self._last_line_s >= _LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self._console.print("  ".join(view.lines()), soft_wrap=True)
