"""Where every accepted trajectory of a run is: counts that always add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from turnstream.errors import TurnstreamError
from turnstream.store import keys
from turnstream.store.configs import read_config
from turnstream.store.runs import list_runs, newest_version
from turnstream.store.scripts import Command, Script, run_command, run_command_async
from turnstream.store.stored import StoredHash, damaged, parsed_number, reading
from turnstream.types import TrajectoryState, VersionAnnounced
from turnstream_server.bus.frontier import Frontier, read_frontier

__all__ = [
    "LedgerCounts",
    "LedgerMismatchError",
    "RunSummary",
    "list_runs",
    "read_ledger",
    "read_ledger_async",
    "run_summary",
]

_READ = Script("read_ledger", "turnstream_server.bus")
_FOLLOW_FROM_THE_FRONTIER = (
    TrajectoryState.PLANNED,
    TrajectoryState.STEPPED,
    TrajectoryState.COMMITTED,
)


_COUNTS = (*TrajectoryState, "accepted", "late_rewards")


class LedgerMismatchError(TurnstreamError):
    """The states of a run do not add up: a defect, or a store that was changed by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Trajectories of a run by state, as of one moment.

    Attributes:
        accepted: trajectories ever opened.
        by_state: how many of them are in each state; every state is a key.
        num_in_batches: trajectories that the manifests name; planned, stepped and committed ones.
        num_late_rewards: rewards that were posted after the group was decided, and changed nothing.
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
        """Trajectories whose batch the optimizer has taken."""
        return self.by_state[TrajectoryState.STEPPED] + self.by_state[TrajectoryState.COMMITTED]

    def check(self) -> None:
        """Make sure that every accepted trajectory is in exactly one state.

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
    """What there is to say of a run at a glance.

    Attributes:
        config_revision: the newest revision of its configuration.
        newest_version: the highest policy version announced; None before the first.
        planner: name of the batcher that plans it; empty if none does.
    """

    run: str
    config_revision: int
    frontier: Frontier
    ledger: LedgerCounts
    newest_version: VersionAnnounced | None
    planner: str


def read_ledger(client: redis.Redis, run: str) -> LedgerCounts:
    """The counts of the run, in one round trip.

    Raises:
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    command = _read(run)
    with reading(" or ".join(command.keys)):
        reply = run_command(client, command)
    return _parse(run, reply)


async def read_ledger_async(client: redis.asyncio.Redis, run: str) -> LedgerCounts:
    """The same as `read_ledger`, for asyncio."""
    command = _read(run)
    with reading(" or ".join(command.keys)):
        reply = await run_command_async(client, command)
    return _parse(run, reply)


def run_summary(client: redis.Redis, run: str) -> RunSummary:
    """The run at a glance, for people; its parts are read one after the other.

    Raises:
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
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
