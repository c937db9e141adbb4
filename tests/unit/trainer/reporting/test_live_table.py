from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import pytest

from testkit import wait_until
from turnstream_server.logs import configure_logging
from turnstream_server.screen import Screen
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.reporting.sinks import (
    COLUMNS,
    NUM_STEPS,
    LiveTable,
    open_sinks,
    steps_table,
)

logger = logging.getLogger(__name__)

_END = "\x1b[7777m"
"""A style that no program uses, after the text that is read."""


class Terminal:
    """A pseudo-terminal: `file` writes to it, and a thread reads what it receives."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.file: TextIO = os.fdopen(slave, "w")
        self._received = bytearray()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def text(self) -> str:
        """Everything since the last call, without escape sequences."""
        self.file.write(_END)
        self.file.flush()
        wait_until(lambda: _END.encode() in self._received, timeout_s=10, describe="the output")
        text = self._received.decode().replace(_END, "")
        self._received.clear()
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)

    def close(self) -> None:
        """Release both ends."""
        self.file.close()
        self._thread.join()
        os.close(self._master)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(self._master, 1 << 16):
                self._received += data


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[Terminal]]:
    """A program with its output, its errors and its log on a terminal of 160 columns."""
    for name, value in {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)

    @contextlib.contextmanager
    def run() -> Iterator[Terminal]:
        terminal, root = Terminal(), logging.getLogger()
        handlers, level = root.handlers[:], root.level
        with redirect_stdout(terminal.file), redirect_stderr(terminal.file):
            configure_logging("INFO", service="trainer")
            yield terminal
        root.handlers[:] = handlers
        root.setLevel(level)
        terminal.close()

    return run


def step(number: int, **changes: Any) -> dict[str, Any]:
    """The metrics of a step."""
    return {**dict.fromkeys(COLUMNS, 0.5), "step": number, **changes}


def rows(text: str) -> list[list[str]]:
    """The cells of the lines that begin with the number of a step; empty cells are missing."""
    return [line.split() for line in text.splitlines() if re.match(r" +[\d,]+ ", line)]


def test_the_table_has_the_last_ten_steps_and_the_log_above_it(
    program: Callable[[], AbstractContextManager[Terminal]],
) -> None:
    with program() as terminal:
        table = LiveTable(Screen(), run="a [run]")
        for number in range(1, 13):
            table.write(number, step(number, reward_mean=None))
        terminal.text()
        logger.info("a line of the log")
        shown = terminal.text()
        table.close()

    head, _, below = shown.partition("a line of the log")
    assert "INFO    trainer" in head
    assert not rows(head)
    assert "a [run]" in below
    found = rows(below)
    assert [cells[0] for cells in found] == [str(number) for number in range(3, 13)]
    assert all(len(cells) == len(COLUMNS) - 1 for cells in found)


def test_a_trainer_shows_the_table_on_a_terminal_alone(
    program: Callable[[], AbstractContextManager[Terminal]], tmp_path: Path
) -> None:
    config, piped = TrainerConfig(run="r", folder=tmp_path), io.StringIO()
    with program() as terminal:
        with open_sinks(config, from_step=0) as sinks:
            sinks.write(7, step(7))
        shown = terminal.text()
        with redirect_stdout(piped), open_sinks(config, from_step=0) as sinks:
            sinks.write(8, step(8))
        shown_later = terminal.text()

    assert rows(shown)[-1][0] == "7"
    assert piped.getvalue() == shown_later == ""


def test_the_table_fits_into_80_columns_with_all_digits() -> None:
    shown = io.StringIO()
    changes = {"kl": 1.2345e-5, "trained_tokens_per_s": 123_456.78, "loss": -0.0123456}
    large = {"reward_mean": -0.012345, "clipped_share": 0.0123456, "step_s": 1234.5}

    Screen(shown, width=80).print(steps_table("r", [step(12_345, **changes, **large)]))

    (cells,) = rows(shown.getvalue())
    found = dict(zip(COLUMNS, cells, strict=True))
    assert found["step"] == "12,345"
    assert (found["trained_tokens_per_s"], found["loss"]) == ("123,457", "-0.0123")
    assert (found["kl"], found["step_s"]) == ("1.23e-05", "1,234")
    assert all(title in shown.getvalue() for title in COLUMNS.values())
    assert NUM_STEPS == 10
