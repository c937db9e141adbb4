"""Several receivers as one, and the file of JSON lines."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from turnstream_server.telemetry.instruments import REGISTRY
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.reporting.sinks import (
    JsonLines,
    Prometheus,
    Sinks,
    open_sinks,
    read_steps,
)


class FullDisk:
    """A receiver that fails at some steps."""

    def __init__(self, *fails_at: int) -> None:
        self.written: list[int] = []
        self.is_closed = False
        self._fails_at = fails_at

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Fail, or remember the step."""
        if step in self._fails_at:
            raise OSError("no space")
        self.written.append(step)

    def close(self) -> None:
        """Remember it."""
        self.is_closed = True


def test_a_failing_sink_is_logged_once_and_the_others_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full, path = FullDisk(2, 3), tmp_path / "metrics.jsonl"

    with Sinks([full, JsonLines(path)]) as sinks:
        for step in range(1, 5):
            sinks.write(step, {"step": step})

    assert full.written == [1, 4]
    assert full.is_closed
    assert [each["step"] for each in read_steps(path)] == [1, 2, 3, 4]
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert record.getMessage() == "FullDisk fails; training continues"
    assert record.exc_info is not None


def test_a_signal_passes_through_the_sinks() -> None:
    class Interrupted(FullDisk):
        def write(self, step: int, metrics: Mapping[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Sinks([Interrupted()]).write(1, {"step": 1})


def test_values_of_a_step_are_declared_and_finite_or_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = {"step": 1, "loss": math.nan, "ratio": math.inf, "entropy": -math.inf}
    with (
        Sinks([JsonLines(path)]) as sinks,
        pytest.warns(UserWarning, match="not declared: entrpy, zzz"),
    ):
        sinks.write(1, {**metrics, "zzz": 0.0, "entrpy": 0.5})

    found = {"step": 1, "loss": None, "ratio": None, "entropy": None, "zzz": 0.0, "entrpy": 0.5}
    assert json.loads(path.read_text()) == found


def test_lines_of_a_restart_replace_their_step_and_all_after_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    # Incomplete lines do not count. The last one is closed, and not continued.
    path.write_text('{"step": 1}\n{"st\n[2]\n3\n{"loss": 0.5}\n{"step": 2}\n{"step": 3')
    for step, loss in [(3, 0.3), (4, 0.4), (3, 0.5)]:
        JsonLines(path).write(step, {"step": step, "loss": loss})

    assert [(each["step"], each.get("loss")) for each in read_steps(path)] == [
        (1, None),
        (2, None),
        (3, 0.5),
    ]


def test_sinks_of_the_settings_alone_are_opened_and_closed_on_errors(tmp_path: Path) -> None:
    # Else the values of a run would be shown twice.
    config = TrainerConfig(run="r", folder=tmp_path, metrics_listen="127.0.0.1:0", wandb="p")
    (tmp_path / "wandb-id").mkdir()  # no file of an id

    for _ in range(2):
        with pytest.raises(OSError, match="wandb-id"), open_sinks(config, from_step=0):
            pass
    assert not any(isinstance(each, Prometheus) for each in REGISTRY._collector_to_names)
    other = TrainerConfig(run="r", folder=tmp_path / "t")
    with open_sinks(other, from_step=0) as sinks:
        sinks.write(1, {"step": 1})
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["metrics.jsonl"]
