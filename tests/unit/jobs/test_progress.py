from __future__ import annotations

import io

import pytest
from rich.console import Console

from turnstream_server.jobs.progress import ProgressDisplay, progress_lines
from turnstream_server.jobs.summary import SealedFigures, summarise

SUMMARY = summarise(
    num_groups=1,
    sealed=[SealedFigures(reward=0.5, num_turns=1, wire_bytes=1, resend_bytes=1)],
    batches={},
    stepped=7,
    ledger={"open": 3, "committed": 1},
    elapsed_s=1.0,
)


def test_progress_shows_time_step_reward_and_ledger() -> None:
    figures, ledger = progress_lines(SUMMARY, elapsed_s=75.0, goal=0.6)

    assert figures == "1:15  step 7  reward 0.500 of 0.600  0 tokens/s"
    assert ledger == "ledger: open 3, committed 1"


def test_a_terminal_shows_the_newest_progress_and_nothing_at_the_end() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)

    with ProgressDisplay(console) as display:
        display.show(SUMMARY, share=0.5, elapsed_s=75.0)
        shown = out.getvalue()

    assert "step 7" in shown
    assert "ledger: open 3" in shown


def test_a_log_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("turnstream_server.jobs.progress._LINE_EVERY_S", 0.0)

    with ProgressDisplay(Console(file=out, width=60)) as display:
        display.show(SUMMARY, share=0.5, elapsed_s=75.0)
        display.show(SUMMARY, share=0.5, elapsed_s=75.0)

    assert len(out.getvalue().splitlines()) == 2


def test_a_log_file_is_not_flooded() -> None:
    out = io.StringIO()

    with ProgressDisplay(Console(file=out)) as display:
        display.show(SUMMARY, share=0.5, elapsed_s=75.0)

    assert out.getvalue() == ""
