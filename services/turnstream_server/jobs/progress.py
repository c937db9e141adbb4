"""The progress of a job: the newest numbers on a terminal, a line at intervals elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from turnstream_server.jobs.summary import Summary

_LINE_EVERY_S = 10.0


def progress_text(summary: Summary, *, elapsed_s: float, goal: float | None = None) -> str:
    """Return the numbers of a job; `goal` is the reward that ends it."""
    minutes, seconds = divmod(int(elapsed_s), 60)
    last = summary.reward_last_tenth
    reward = "-" if last is None else f"{last:.3f}"
    reward += "" if goal is None else f" of {goal:.3f}"
    states = [f"{state} {count:,}" for state, count in summary.ledger.items()]
    return (
        f"{minutes}:{seconds:02}  step {summary.steps}  reward {reward}  "
        f"{summary.tokens_per_s:,.0f} tokens/s  ledger: {', '.join(states) or 'empty'}"
    )


@contextmanager
def progress_display(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text in place of the last one.

    Without a terminal it prints one line every ten seconds.
    """
    last_line_s = time.monotonic()
    with console.status("starting") as status:

        def show(text: str) -> None:
            nonlocal last_line_s
            if console.is_terminal:
                status.update(text)
            elif time.monotonic() - last_line_s >= _LINE_EVERY_S:
                last_line_s = time.monotonic()
                console.print(text, soft_wrap=True)

        yield show
