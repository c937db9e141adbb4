"""Counts of the accepted trajectories of a run by state; they always add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from turnstream.errors import TurnstreamError
from turnstream.store.client import keys
from turnstream.store.client.scripts import Command, Script, run_command, run_command_async
from turnstream.store.client.stored_values import StoredHash, damaged, parsed_number, reading
from turnstream.store.run.configs import read_config
from turnstream.store.run.runs import newest_version
from turnstream.types import TrajectoryState, VersionAnnounced
from turnstream_server.bus.core.frontier import Frontier, read_frontier

_READ = Script("read_ledger", "turnstream_server.bus.queries")
_FOLLOW_FROM_THE_FRONTIER = (
    TrajectoryState.PLANNED,
    TrajectoryState.STEPPED,
    TrajectoryState.COMMITTED,
)
_COUNTS = (*TrajectoryState, "accepted", "late_rewards")


class LedgerMismatchError(TurnstreamError):
    """The states of a run do not add up: a defect, or a store that was edited by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Trajectories of a run by state in one snapshot.

    Attributes:
        accepted: trajectories ever opened.
        by_state: number of them in each state; every state is a key.
        num_in_batches: trajectories in manifests: planned, stepped and committed ones.
        num_late_rewards: rewards without effect, posted after the group was decided.
        num_conflicts: writes that were refused because their key has another content.
        last_conflict: the last of them, "<trajectory id>: <why>"; empty if there was none.
    """

    accepted: int
    by_state: Mapping[TrajectoryState, int]
    num_in_batches: int
    num_late_rewards: int = 0
    num_conflicts: int = 0
    last_conflict: str = ""

    @property
    def num_trained(self) -> int:
        """Number of trajectories in stepped batches."""
        return self.by_state[TrajectoryState.STEPPED] + self.by_state[TrajectoryState.COMMITTED]

    def check(self) -> None:
        """Check that every accepted trajectory is in exactly one state.

        Raises:
            LedgerMismatchError: the states do not add up, or one of them is below 0.
        """
        total = sum(self.by_state.values())
        in_batches = sum(self.by_state[state] for state in _FOLLOW_FROM_THE_FRONTIER)
        if (
            total != self.accepted
            or in_batches != self.num_in_batches
            or min(self.by_state.values()) < 0
        ):
            shown = ", ".join(f"{state} {number}" for state, number in self.by_state.items())
            raise LedgerMismatchError(
                f"accepted {self.accepted}, in batches {self.num_in_batches}, but {shown}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Summary of a run for one screen.

    Attributes:
        config_revision: the newest revision of its configuration.
        newest_version: the highest policy version announced; None before the first.
        planner: name of the batcher that plans it; empty without one.
    """

    run: str
    config_revision: int
    frontier: Frontier
    ledger: LedgerCounts
    newest_version: VersionAnnounced | None
    planner: str


def read_ledger(client: redis.Redis, run: str) -> LedgerCounts:
    """Return the counts of a run in one round trip."""
    command = _read(run)
    with reading(" or ".join(command.keys)):
        reply = run_command(client, command)
    return _parse(run, reply)


async def read_ledger_async(client: redis.asyncio.Redis, run: str) -> LedgerCounts:
    """Return the counts of a run like `read_ledger`, for asyncio."""
    command = _read(run)
    with reading(" or ".join(command.keys)):
        reply = await run_command_async(client, command)
    return _parse(run, reply)


def run_summary(client: redis.Redis, run: str) -> RunSummary:
    """Return the summary of a run; its parts are read one after the other."""
    revision, _ = read_config(client, run)
    owner: Any = client.hget(keys.run_keys(run).leader, "owner")
    return RunSummary(
        run=run,
        config_revision=revision,
        frontier=read_frontier(client, run),
        ledger=read_ledger(client, run),
        newest_version=newest_version(client, run),
        planner=(owner or b"").decode(),
    )


def _read(run: str) -> Command:
    names = keys.run_keys(run)
    return _READ((names.frontier, names.batches, names.counts, names.conflicts))


def _parse(run: str, reply: list[Any]) -> LedgerCounts:
    names = keys.run_keys(run)
    until_stepped, until_committed, until_planned, flat, (num_conflicts, last_conflict) = reply
    if None in (until_stepped, until_committed, until_planned):
        raise damaged(names.batches, "", "the entry of a step is no number of trajectories")
    stored = StoredHash(names.counts, dict(zip(flat[::2], flat[1::2], strict=True)))
    counts = {name: stored.parsed(name, parsed_number, 0) for name in _COUNTS}
    conflicts = StoredHash(
        names.conflicts, {b"num": num_conflicts or b"0", b"last": last_conflict or b""}
    )
    by_state = {state: counts[state] for state in TrajectoryState}
    # The count of "planned" holds every trajectory that was ever planned.
    by_state[TrajectoryState.PLANNED] = counts["planned"] - until_stepped
    by_state[TrajectoryState.STEPPED] = until_stepped - until_committed
    by_state[TrajectoryState.COMMITTED] = until_committed
    return LedgerCounts(
        accepted=counts["accepted"],
        by_state=by_state,
        num_in_batches=until_planned,
        num_late_rewards=counts["late_rewards"],
        num_conflicts=conflicts.needed("num", parsed_number),
        last_conflict=conflicts.needed("last", bytes.decode),
    )
