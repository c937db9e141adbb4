"""The leadership of a run: a lease with a fencing number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import redis.asyncio

from turnstream.store.client.scripts import Command
from turnstream_server.ledger.core.run_script import RunScript

_ACQUIRE = RunScript("acquire_leader", "leadership", "frontier leader")


class Position(NamedTuple):
    """The last entries of `events` and `wake` that a planner has read; "0-0" before the first."""

    event_id: str
    wake_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """The current leader of a run.

    Attributes:
        epoch: fencing number of the leader; every script of the planner takes it.
        parked: the position up to which a parked run was read; None if it is not parked.
    """

    is_ours: bool
    epoch: int
    owner: str
    lease_left_s: float
    parked: Position | None = None


@dataclass(frozen=True, slots=True)
class RunClient:
    """A run, and a client of its store."""

    client: redis.asyncio.Redis
    run: str


@dataclass(frozen=True, slots=True)
class Term(RunClient):
    """A replica's term as leader of a run.

    Each read and write of an earlier term than the current one raises FencedError.
    """

    epoch: int


async def acquire_leadership(
    client: redis.asyncio.Redis,
    run: str,
    *,
    owner: str,
    lease_s: float,
    leads_parked: bool = True,
) -> Leadership:
    """Acquire or keep the leadership of a run; the same owner keeps its epoch.

    The name of the owner is unique also among its restarts. With `leads_parked` also a parked run
    is led.
    """
    words = (owner, max(1, round(lease_s * 1000)), int(not leads_parked), "")
    leads, epoch, leader, left_ms, parked = await _ACQUIRE.call_async(client, run, *words)
    return Leadership(
        is_ours=bool(leads),
        epoch=epoch,
        owner=leader.decode(),
        lease_left_s=left_ms / 1000,
        parked=Position(*parked.decode().split()) if parked else None,
    )


def renew_command(run: str, *, owner: str, epoch: int, lease_s: float) -> Command:
    """Return the call that renews a leadership; it replies (is it ours, its epoch, its owner)."""
    return _ACQUIRE(run, owner, max(1, round(lease_s * 1000)), 0, epoch)
