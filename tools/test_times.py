"""Print where the time of a test run went, from the file of `pytest --cpu-report FILE`.

python tools/test_times.py FILE [--depth 3] [--top 30] [--over 5]

First folders (of so many parts), then files and tests, by CPU seconds; last the tests that took
longer than `--over` seconds.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """The time of a test."""

    test: str
    wall_s: float
    cpu_s: float

    @property
    def file(self) -> str:
        """The path of its file."""
        return self.test.partition("::")[0]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--over", type=float, default=5.0)
    options = parser.parse_args()
    rows = read(options.report)
    _print("folder", grouped(rows, lambda row: folder(row.file, depth=options.depth)))
    _print("file", grouped(rows, lambda row: row.file), top=options.top)
    _print("test", grouped(rows, lambda row: row.test), top=options.top)
    slow = [row for row in rows if row.wall_s > options.over]
    _print(f"longer than {options.over:g} s", grouped(slow, lambda row: row.test))


def read(path: Path) -> list[Row]:
    """Return the rows of a report."""
    with path.open(newline="") as file:
        return [
            Row(each["test"], float(each["wall_s"]), float(each["cpu_s"]))
            for each in csv.DictReader(file)
        ]


def folder(file: str, *, depth: int) -> str:
    """Return the folder of a file, cut to so many parts.

    >>> folder("tests/unit/trainer/critic/test_values.py", depth=3)
    'tests/unit/trainer'
    """
    return "/".join(file.split("/")[:-1][:depth]) or file


def grouped(rows: list[Row], key: Callable[[Row], str]) -> list[tuple[str, int, float, float]]:
    """Return name, number of tests, wall seconds and CPU seconds of each group, largest first."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    sums = [
        (name, len(own), sum(each.wall_s for each in own), sum(each.cpu_s for each in own))
        for name, own in groups.items()
    ]
    return sorted(sums, key=lambda each: -each[3])


def _print(title: str, groups: list[tuple[str, int, float, float]], *, top: int = 10_000) -> None:
    print(f"{'CPU s':>8} {'wall s':>8} {'tests':>6}  {title}")
    for name, count, wall_s, cpu_s in groups[:top]:
        print(f"{cpu_s:8.1f} {wall_s:8.1f} {count:6}  {name}")
    count = sum(each[1] for each in groups)
    wall_s, cpu_s = sum(each[2] for each in groups), sum(each[3] for each in groups)
    print(f"{cpu_s:8.1f} {wall_s:8.1f} {count:6}  all\n")


if __name__ == "__main__":
    main()
