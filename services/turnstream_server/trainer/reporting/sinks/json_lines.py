"""Metrics as JSON lines, one for each step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

FILE_NAME: Final = "metrics.jsonl"
"""Name of the file in the folder of a trainer."""


class JsonLines:
    """Appends lines to a file; a line that a crash interrupted is closed, not continued."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            self._append("\n")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line; `metrics` has the step."""
        self._append(json.dumps(metrics) + "\n")

    def close(self) -> None:
        """Do nothing: each line is written at once."""

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step, in order; [] for a file without complete lines.

    After a restart, a line ends the lines before it from its step on. An incomplete line does not
    count.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            metrics = json.loads(line)
            step = metrics["step"]
        except (ValueError, KeyError, TypeError):
            continue
        steps = {number: each for number, each in steps.items() if number < step}
        steps[step] = metrics
    return list(steps.values())
