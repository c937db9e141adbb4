"""The results of a long run, as a table and as JSON."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import redis
from rich.table import Column, Table

from harness.running import Stack
from turnstream_server.bus.core.frontier import read_frontier

MAX_STORE_BYTES = 1 << 30
"""Limit of the store's memory, enough for half an hour."""


@dataclass(slots=True, kw_only=True)
class Survival:
    """The results of one kind of fault.

    Attributes:
        num_injected: number of faults that took effect.
        num_in_vain: number of faults that were drawn and took no effect.
        recoveries_s: seconds until the next step, one for each survived fault.
    """

    num_injected: int = 0
    num_in_vain: int = 0
    recoveries_s: list[float] = field(default_factory=list[float])

    def facts(self) -> dict[str, Any]:
        """Return the numbers for a file."""
        recoveries_s = self.recoveries_s
        return {
            "injected": self.num_injected,
            "in_vain": self.num_in_vain,
            "survived": len(recoveries_s),
            "median_recovery_s": statistics.median(recoveries_s) if recoveries_s else 0.0,
            "longest_recovery_s": max(recoveries_s, default=0.0),
        }


@dataclass(slots=True, kw_only=True)
class Report:
    """The results of a long run.

    Attributes:
        survivals: results for each fault.
        totals: numbers of steps, sessions, trajectories and cuts.
        ledger: trajectories by state.
        most_store_bytes: peak memory of the store.
    """

    durability: str
    seconds: float
    survivals: dict[str, Survival]
    totals: Counter[str] = field(default_factory=Counter[str])
    ledger: Counter[str] = field(default_factory=Counter[str])
    rewards: Counter[str] = field(default_factory=Counter[str])
    most_store_bytes: int = 0

    def look(self, client: redis.Redis) -> None:
        """I8: assert that the store's memory is below its limit, if the store answers."""
        with contextlib.suppress(redis.RedisError, OSError):
            memory: Any = client.info("memory")
            self.most_store_bytes = max(self.most_store_bytes, memory["used_memory"])
        assert self.most_store_bytes < MAX_STORE_BYTES

    def close(self, stack: Stack) -> None:
        """Read the numbers of a run that has ended."""
        rig, history = stack.rig, stack.rig.history()
        self.totals = Counter(
            steps=sum(1 for _ in history.of("stepped")),
            trainer_sessions=len(history.sessions),
            cuts=len(rig.cuts),
            acknowledged_trajectories=len(history.acknowledged),
            taken_over=sum(1 for _ in history.of("taken")),
            archived_and_released_steps=read_frontier(rig.client, rig.run).released,
        )
        self.rewards = Counter(line["outcome"].lower() for line in history.of("posted"))
        self.ledger = Counter(rig.counts())

    def facts(self) -> dict[str, Any]:
        """Return all numbers for a file."""
        return {
            "durability": self.durability,
            "seconds": self.seconds,
            **self.totals,
            "rewards": dict(self.rewards),
            "ledger": dict(self.ledger),
            "most_store_bytes": self.most_store_bytes,
            "faults": {name: survival.facts() for name, survival in self.survivals.items()},
        }

    def table(self) -> Table:
        """Return a table for the terminal."""
        totals = ", ".join(f"{number} {name}" for name, number in self.totals.items())
        table = Table(
            Column("fault", no_wrap=True),
            *("injected", "in vain", "survived", "median s", "longest s"),
            title=f"{self.durability}: {totals}; {dict(self.ledger)}; rewards {dict(self.rewards)}",
        )
        for name, survival in self.survivals.items():
            injected, in_vain, survived, median_s, longest_s = survival.facts().values()
            seconds = (f"{median_s:.2f}", f"{longest_s:.2f}")
            table.add_row(name, str(injected), str(in_vain), str(survived), *seconds)
        return table
