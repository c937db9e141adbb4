from __future__ import annotations

import io

import pytest
from rich.console import Console

from testkit import sealed
from turnstream_server.jobs.job import progress_display, progress_text
from turnstream_server.jobs.summary import summarise

SUMMARY = summarise(
    num_groups=1,
    sealed=[sealed(reward=0.5)],
    batches=[],
    planned=7,
    stepped=7,
    ledger={"open": 3, "committed": 1},
    elapsed_s=1.0,
)


def test_progress_shows_time_step_reward_and_ledger() -> None:
    text = progress_text(SUMMARY, elapsed_s=75.0, goal=0.6)

    numbers = "1:15  step 7  reward 0.500 of 0.600  0 tokens/s"
    assert text == f"{numbers}  ledger: open 3, committed 1"


def test_terminal_shows_the_newest_progress() -> None:
    out = io.StringIO()

    with progress_display(Console(file=out, force_terminal=True, width=100)) as show:
        show("step 7")

    assert "step 7" in out.getvalue()


@pytest.mark.parametrize(("every_s", "num_lines"), [(0.0, 2), (10.0, 0)])
def test_log_file_gets_a_line_at_intervals(
    monkeypatch: pytest.MonkeyPatch, every_s: float, num_lines: int
) -> None:
    out = io.StringIO()
    monkeypatch.setattr("turnstream_server.jobs.job._LINE_EVERY_S", every_s)

    with progress_display(Console(file=out, width=60)) as show:
        for _ in range(2):
            show("step 7")

    assert len(out.getvalue().splitlines()) == num_lines
