"""Random faults over a running stack: `make chaos SECONDS=1800`.

After every fault the ranks must take another step; at the end all of the run is trained, and the
checker has the last word. The seed is printed first: the same one draws the same faults.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import secrets
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from harness.faults import FAULTS, Stack
from harness.machine import Machine
from harness.proxy import Proxy
from harness.rig import Rig, config
from turnstream.store.runs import close_run
from turnstream_server.embedded import EmbeddedServer

RECOVERY_S = 90.0
"""By when a step must be taken after a fault."""

CONFIG = config(max_staleness=8, lease_s=5.0)
"""What a killed generator left is given up soon."""

MAX_STORE_BYTES = 1 << 30
"""Memory of the store: every step is kept, for half an hour."""


@dataclass(slots=True, kw_only=True)
class Survival:
    """What became of one kind of fault.

    Attributes:
        num_injected: how often it was.
        recoveries_s: seconds until the next step was taken, one for each that was survived.
    """

    num_injected: int = 0
    recoveries_s: list[float] = field(default_factory=list[float])


@dataclass(slots=True, kw_only=True)
class Report:
    """What a long run has shown."""

    seed: int
    seconds: float
    faults: dict[str, Survival]
    num_steps: int = 0
    num_sessions: int = 0
    num_acknowledged: int = 0
    counts: dict[str, int] = field(default_factory=dict[str, int])
    most_store_bytes: int = 0

    def look(self, client: redis.Redis) -> None:
        """I8: the store's memory is below its cap, whenever it can be asked."""
        with contextlib.suppress(redis.RedisError, OSError):
            memory: Any = client.info("memory")
            self.most_store_bytes = max(self.most_store_bytes, memory["used_memory"])
        assert self.most_store_bytes < MAX_STORE_BYTES

    def as_json(self) -> str:
        """For a file."""
        faults = {
            name: {
                "injected": survival.num_injected,
                "survived": len(survival.recoveries_s),
                "median_recovery_s": _median(survival),
                "longest_recovery_s": max(survival.recoveries_s, default=0.0),
            }
            for name, survival in self.faults.items()
        }
        facts = {
            "seed": self.seed,
            "seconds": self.seconds,
            "steps": self.num_steps,
            "trainer_sessions": self.num_sessions,
            "acknowledged_trajectories": self.num_acknowledged,
            "ledger": self.counts,
            "most_store_bytes": self.most_store_bytes,
            "faults": faults,
        }
        return json.dumps(facts, indent=2) + "\n"

    def table(self) -> Table:
        """For people."""
        table = Table(
            "fault",
            "injected",
            "survived",
            "median s",
            "longest s",
            title=(
                f"{self.num_steps} steps, {self.num_sessions} trainer sessions, "
                f"{self.num_acknowledged} acknowledged trajectories, ledger {self.counts}"
            ),
        )
        for name, survival in self.faults.items():
            longest_s = max(survival.recoveries_s, default=0.0)
            counts = (str(survival.num_injected), str(len(survival.recoveries_s)))
            table.add_row(name, *counts, f"{_median(survival):.2f}", f"{longest_s:.2f}")
        return table


def _median(survival: Survival) -> float:
    return statistics.median(survival.recoveries_s) if survival.recoveries_s else 0.0


def soak(folder: Path, *, seconds: float, every_s: float, seed: int) -> Report:
    """Inject a fault about every `every_s` seconds, then train all and check everything.

    Every kind of fault comes once before any comes again.

    Raises:
        TimeoutError: no step was taken after a fault.
        HistoryError: the history contradicts the promise.
    """
    machine = Machine(folder)
    report = Report(seed=seed, seconds=seconds, faults={f.__name__: Survival() for f in FAULTS})
    with (
        EmbeddedServer(
            folder / "store",
            binary=machine.binary,
            durability="fsync",
            max_memory_bytes=MAX_STORE_BYTES,
        ) as server,
        Rig(folder, server, config=CONFIG) as rig,
        Proxy(server.url) as store,
        Proxy(rig.address()) as door,
    ):
        rig.store_url = store.url
        rng = random.Random(seed)
        stack = Stack(rig=rig, machine=machine, store=store, door=door, rng=rng)
        stack.start()
        _inject(stack, report, seconds=seconds, every_s=every_s)
        _finish(stack, report)
    return report


def _inject(stack: Stack, report: Report, *, seconds: float, every_s: float) -> None:
    deadline_s = time.monotonic() + seconds
    steps = StepCounter(stack.rig.folder / "history")
    _await_step(stack, steps, report, after="the start")
    bag: list[int] = []
    while time.monotonic() < deadline_s:
        bag = bag or stack.rng.sample(range(len(FAULTS)), len(FAULTS))
        fault = FAULTS[bag.pop()]
        survival = report.faults[fault.__name__]
        survival.num_injected += 1
        fault(stack)
        began_s = time.monotonic()
        _await_step(stack, steps, report, after=fault.__name__)
        survival.recoveries_s.append(time.monotonic() - began_s)
        stack.pause(max(0.0, stack.rng.uniform(0.5, 1.5) * every_s - survival.recoveries_s[-1]))


def _await_step(stack: Stack, steps: StepCounter, report: Report, *, after: str) -> None:
    before = steps.count()

    def is_taken() -> bool:
        stack.mend()
        report.look(stack.rig.client)
        return steps.count() > before

    stack.rig.wait(is_taken, f"a step after {after}", timeout_s=RECOVERY_S)


def _finish(stack: Stack, report: Report) -> None:
    """Generators stop, all that is sealed is trained, and the history is proved."""
    rig = stack.rig
    for rank in rig.ranks:
        rank.kill()
    stack.mend_services()
    close_run(rig.client, rig.run)  # which ends the generators
    rig.drain(2, timeout_s=30)
    history = rig.history()
    report.num_steps = sum(1 for _ in history.of("stepped"))
    report.num_sessions = len(history.sessions)
    report.num_acknowledged = len(history.acknowledged)
    report.counts = rig.counts()
    report.look(rig.client)


class StepCounter:
    """Counts steps in the logs of the ranks, reading every byte once.

    Args:
        folder: of the logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_to: dict[Path, int] = {}
        self._count = 0

    def count(self) -> int:
        """Steps acknowledged so far, by whatever session."""
        for path in self._folder.glob("session-*-rank-0.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read_to.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")
            self._read_to[path] = self._read_to.get(path, 0) + len(whole)
            self._count += whole.count(b'"kind": "stepped"')
        return self._count


def main() -> None:
    """The long run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--every-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    console = Console()
    console.print(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="turnstream-chaos-") as folder:
        report = soak(Path(folder), seconds=options.seconds, every_s=options.every_s, seed=seed)
    console.print(report.table())
    if options.json is not None:
        options.json.write_text(report.as_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
