"""Wall and CPU seconds of each test, with the processes that it starts: `pytest --cpu-report FILE`.

`tools/test_times.py FILE` prints the largest files and tests.
"""

from __future__ import annotations

import csv
import os
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

OPTION: Final = "--cpu-report"
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def used_s() -> float:
    """Return the CPU seconds of this process and of all processes below it, ended ones too."""
    own = (resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in own) + _below_s("self")


def _below_s(pid: str) -> float:
    """Return the CPU seconds of the live processes below one, with the ended ones below them."""
    total_s = 0.0
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _text(file).split():
            times = _text(Path(f"/proc/{child}/stat")).rpartition(")")[2].split()[11:15]
            total_s += sum(map(int, times)) / _TICKS_PER_S + _below_s(child)
    return total_s


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""  # the process has ended


class Measure:
    """Part of the plugin in each process that runs tests: notes the CPU seconds of each phase.

    With xdist the reports bring them to the controller.
    """

    def __init__(self) -> None:
        self._seen_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[Any]:
        """Note what the phase has used since the phase before."""
        report: Any = yield
        report.cpu_s = self._passed_s()
        report.process = os.getpid()
        return report

    def _passed_s(self) -> float:
        before_s, self._seen_s = self._seen_s, used_s()
        return max(0.0, self._seen_s - before_s)


class Collect:
    """Part of the plugin in the process that the user started: writes the file at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._times_s: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._processes = set[int]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add a phase; the first one of a process has the imports of the collection."""
        if not hasattr(report, "cpu_s"):
            return  # of a test whose process has died
        is_first = report.process not in self._processes
        self._processes.add(report.process)
        times_s = self._times_s[f"(collection)::{report.process}" if is_first else report.nodeid]
        times_s[0] += report.duration
        times_s[1] += report.cpu_s

    def pytest_sessionfinish(self) -> None:
        """Write one line for each test."""
        with self._path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["test", "wall_s", "cpu_s"])
            for test, times_s in self._times_s.items():
                writer.writerow([test, *(f"{each:.3f}" for each in times_s)])


def register(config: pytest.Config) -> None:
    """Register the plugin where the option is given."""
    path = config.getoption(OPTION)
    if path is None:
        return
    config.pluginmanager.register(Measure())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Collect(Path(path)))
