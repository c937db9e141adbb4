"""What a long run has shown, for people and for a page that is filled from it."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis
from rich.table import Column, Table

from harness.running import Stack
from turnstream_server.bus.frontier import read_frontier

MAX_STORE_BYTES = 1 << 30
"""Memory of a store: what is kept of half an hour."""


@dataclass(slots=True, kw_only=True)
class Survival:
    """What became of one kind of fault.

    Attributes:
        num_injected: how often it came about.
        num_in_vain: how often it was drawn and did not: nobody was where it would have struck.
        recoveries_s: seconds until the next step was taken, one for each that was survived.
    """

    num_injected: int = 0
    num_in_vain: int = 0
    recoveries_s: list[float] = field(default_factory=list[float])

    def facts(self) -> dict[str, Any]:
        """For a file."""
        recoveries_s = self.recoveries_s
        return {
            "injected": self.num_injected,
            "in_vain": self.num_in_vain,
            "survived": len(recoveries_s),
            "median_recovery_s": statistics.median(recoveries_s) if recoveries_s else 0.0,
            "longest_recovery_s": max(recoveries_s, default=0.0),
        }


class Report:
    """What half of a long run has shown, on one store.

    Args:
        durability: of the store.
        seconds: in which faults were injected.
        faults: names of all of them.

    Attributes:
        num_cuts: how often the store was killed or its power cut, where that can lose something.
        num_gone: acknowledged trajectories that are gone with their generators.
        num_taken_over: trajectories that another generator went on with.
        num_released: steps that are in the archive alone.
        rewards: what was said of those that were posted after the seal.
        most_store_bytes: that the store ever used.
    """

    def __init__(self, *, durability: str, seconds: float, faults: Iterable[str]) -> None:
        self.durability = durability
        self.seconds = seconds
        self.survivals = {name: Survival() for name in faults}
        self.num_steps = 0
        self.num_sessions = 0
        self.num_acknowledged = 0
        self.num_cuts = 0
        self.num_gone = 0
        self.num_taken_over = 0
        self.num_released = 0
        self.rewards: Counter[str] = Counter()
        self.counts: dict[str, int] = {}
        self.reached: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.most_store_bytes = 0

    def look(self, client: redis.Redis) -> None:
        """I8: the store's memory is below its cap, whenever it can be asked."""
        with contextlib.suppress(redis.RedisError, OSError):
            memory: Any = client.info("memory")
            self.most_store_bytes = max(self.most_store_bytes, memory["used_memory"])
        assert self.most_store_bytes < MAX_STORE_BYTES

    def close(self, stack: Stack) -> None:
        """Take the counts of a run that has ended."""
        history = stack.rig.history()
        self.num_steps = sum(1 for _ in history.of("stepped"))
        self.num_sessions = len(history.sessions)
        self.num_acknowledged = len(history.acknowledged)
        self.num_cuts = len(stack.rig.cuts)
        self.num_gone = len(stack.rig.gone())
        self.num_taken_over = sum(1 for _ in history.of("taken"))
        self.num_released = read_frontier(stack.rig.client, stack.rig.run).released
        self.rewards = Counter(line["outcome"].lower() for line in history.of("posted"))
        self.counts = stack.rig.counts()
        self.reached, self.missed = stack.reached, stack.missed

    def facts(self) -> dict[str, Any]:
        """For a file."""
        return {
            "seconds": self.seconds,
            "steps": self.num_steps,
            "trainer_sessions": self.num_sessions,
            "acknowledged_trajectories": self.num_acknowledged,
            "cuts": self.num_cuts,
            "gone_with_their_generators": self.num_gone,
            "taken_over": self.num_taken_over,
            "archived_and_released_steps": self.num_released,
            "rewards": dict(self.rewards),
            "ledger": self.counts,
            "most_store_bytes": self.most_store_bytes,
            "faults": {name: survival.facts() for name, survival in self.survivals.items()},
            "failpoints": _failpoints([self]),
        }

    def table(self) -> Table:
        """For people."""
        table = Table(
            Column("fault", no_wrap=True),
            *("injected", "in vain", "survived", "median s", "longest s"),
            title=(
                f"{self.durability}: {self.num_steps} steps, {self.num_sessions} trainer sessions, "
                f"{self.num_acknowledged} acknowledged trajectories, ledger {self.counts}; "
                f"{self.num_cuts} cuts, {self.num_gone} trajectories gone with their generators; "
                f"{self.num_taken_over} taken over, {self.num_released} steps left to the archive, "
                f"rewards after the seal {dict(self.rewards)}"
            ),
            caption=f"failpoints: {dict(self.reached)}; not reached: {dict(self.missed)}",
        )
        for name, survival in self.survivals.items():
            injected, in_vain, survived, median_s, longest_s = survival.facts().values()
            seconds = (f"{median_s:.2f}", f"{longest_s:.2f}")
            table.add_row(name, str(injected), str(in_vain), str(survived), *seconds)
        return table


def whole_json(reports: Sequence[Report], *, seed: int) -> str:
    """All of a long run: its sums, and every store by itself, under `modes`."""
    names = reports[0].survivals
    ledger = sum((Counter(report.counts) for report in reports), Counter[str]())
    facts = {
        "seed": seed,
        "seconds": sum(report.seconds for report in reports),
        "steps": sum(report.num_steps for report in reports),
        "trainer_sessions": sum(report.num_sessions for report in reports),
        "acknowledged_trajectories": sum(report.num_acknowledged for report in reports),
        "gone_with_their_generators": sum(report.num_gone for report in reports),
        "taken_over": sum(report.num_taken_over for report in reports),
        "archived_and_released_steps": sum(report.num_released for report in reports),
        "rewards": dict(sum((report.rewards for report in reports), Counter[str]())),
        "ledger": dict(ledger),
        "faults": {name: _both(reports, name).facts() for name in names},
        "failpoints": _failpoints(reports),
        "modes": {report.durability: report.facts() for report in reports},
    }
    return json.dumps(facts, indent=2) + "\n"


def _both(reports: Sequence[Report], name: str) -> Survival:
    found = [report.survivals[name] for report in reports]
    return Survival(
        num_injected=sum(each.num_injected for each in found),
        num_in_vain=sum(each.num_in_vain for each in found),
        recoveries_s=[seconds for each in found for seconds in each.recoveries_s],
    )


def _failpoints(reports: Sequence[Report]) -> dict[str, dict[str, int]]:
    reached = sum((report.reached for report in reports), Counter[str]())
    missed = sum((report.missed for report in reports), Counter[str]())
    return {
        name: {"reached": reached[name], "missed": missed[name]}
        for name in sorted({*reached, *missed})
    }
