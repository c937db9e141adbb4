"""CPU time and store commands of runs that wait for nothing: idle ones and closed ones.

A store and a batcher process serve `--runs` runs that have no work. After `--settle` seconds the
CPU seconds of both processes, and the commands that the store processes, are counted over
`--window` seconds. The line without runs is the cost of the two processes themselves.

    .venv/bin/python benchmarks/idle.py --runs 200 --window 30
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from processes import cpu_seconds

KINDS = ("none", "idle", "closed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one kind of runs over one window.

    Attributes:
        kind: "none" (no run at all), "idle" or "closed".
        num_runs: runs of this kind.
        window_s: length of the window.
        batcher_cpu_s: CPU seconds of the batcher process.
        store_cpu_s: CPU seconds of the store.
        commands: commands that the store processed, without those of the benchmark itself.
    """

    kind: str
    num_runs: int
    window_s: float
    batcher_cpu_s: float
    store_cpu_s: float
    commands: int

    @property
    def core_percent(self) -> float:
        """CPU time of both processes, in percent of one core."""
        return 100 * (self.batcher_cpu_s + self.store_cpu_s) / self.window_s


@contextmanager
def services() -> Iterator[tuple[Any, int]]:
    """A store and a batcher process; yields the store and the id of the batcher process."""
    from turnstream_server.embedded import EmbeddedServer
    from turnstream_server.launch.stack import Stack

    with tempfile.TemporaryDirectory() as folder, EmbeddedServer() as server:
        stack = Stack(Path(folder), store_url=server.url)
        try:
            yield server, stack.start_batcher().pid
        finally:
            stack.stop()


def make_runs(url: str, kind: str, num_runs: int) -> None:
    """Create the runs, and close them where their kind is "closed"."""
    from turnstream.batching.config import BatchingConfig
    from turnstream.store.client.connection import connect
    from turnstream.store.run.runs import close_run, create_run

    config = BatchingConfig(batch_groups=4, mini_batch_groups=4, max_staleness=1)
    with connect(url) as client:
        for number in range(num_runs):
            create_run(client, f"{kind} {number}", config)
            if kind == "closed":
                close_run(client, f"{kind} {number}")


def num_commands(url: str) -> int:
    """Commands that the store has processed."""
    from turnstream.store.client.connection import connect

    with connect(url) as client:
        found: Any = client.info("stats")
    return found["total_commands_processed"]


def measure(kind: str, num_runs: int, *, settle_s: float, window_s: float) -> Cost:
    """Cost of runs of one kind, in processes of their own."""
    with services() as (server, batcher):
        make_runs(server.url, kind, num_runs)
        time.sleep(settle_s)
        own = -num_commands(server.url) + num_commands(server.url)
        pids = (batcher, server.pid)
        commands, before = num_commands(server.url), [cpu_seconds(pid) for pid in pids]
        started_s = time.monotonic()
        time.sleep(window_s)
        batcher_s, store_s = (
            cpu_seconds(pid) - used for pid, used in zip(pids, before, strict=True)
        )
        return Cost(
            kind=kind,
            num_runs=num_runs,
            window_s=time.monotonic() - started_s,
            batcher_cpu_s=batcher_s,
            store_cpu_s=store_s,
            commands=num_commands(server.url) - commands - own,
        )


def report(costs: list[Cost]) -> None:
    """Print a line per kind of runs."""
    print(
        f"{'runs':>5} {'kind':8} {'batcher, CPU s':>15} {'store, CPU s':>13} {'of a core':>10} "
        f"{'commands/s':>11}"
    )
    for each in costs:
        print(
            f"{each.num_runs:5} {each.kind:8} {each.batcher_cpu_s:15.3f} {each.store_cpu_s:13.3f} "
            f"{each.core_percent:9.2f}% {each.commands / each.window_s:11.1f}"
        )


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--settle", type=float, default=30.0, help="seconds before the window")
    parser.add_argument("--window", type=float, default=30.0, help="seconds that are measured")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only runs of this kind")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    costs = [
        measure(
            kind,
            0 if kind == "none" else arguments.runs,
            settle_s=arguments.settle,
            window_s=arguments.window,
        )
        for kind in arguments.kind or KINDS
    ]
    report(costs)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        found = [asdict(each) | {"core_percent": each.core_percent} for each in costs]
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
