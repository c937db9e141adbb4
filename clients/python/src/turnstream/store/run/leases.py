"""Leases of open trajectories: renewed by heartbeats, adopted after they ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import redis.asyncio

from turnstream.store.client import keys
from turnstream.store.client.run_ids import find_run_async
from turnstream.store.client.scripts import Argument, Command, Script, run_command_async
from turnstream.types import TrajectoryKey

_HEARTBEAT = Script("heartbeat", "turnstream.store.run")
_ADOPT = Script("adopt", "turnstream.store.run")
_LIST_LAPSED = Script("list_lapsed", "turnstream.store.run")

MAX_HEARTBEATS = 256
"""Trajectories of one heartbeat: the store does nothing else for the quarter of a millisecond."""

MAX_LAPSED = 256
"""Trajectories of one list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LapsedTrajectory:
    """An open trajectory whose lease has ended.

    Attributes:
        writer: its owner until another generator adopts it.
        epoch: its lease epoch.
    """

    key: TrajectoryKey
    writer: str
    epoch: int


async def list_lapsed_async(
    client: redis.asyncio.Redis,
    run: str,
    *,
    until_ms: int | None = None,
    max_count: int = MAX_LAPSED,
) -> list[LapsedTrajectory]:
    """Return the trajectories that may be adopted, the longest lapsed first."""
    run = await find_run_async(client, run)
    command = list_lapsed_command(run, until_ms=until_ms, max_count=max_count)
    return parse_lapsed(await run_command_async(client, command))


def heartbeat_command(run: str, held: Sequence[tuple[str, int]], *, writer: str) -> Command:
    """Return the call that renews leases, at most MAX_HEARTBEATS: (id, lease epoch) of each."""
    names = keys.run_keys(run)
    arguments: list[Argument] = []
    for trajectory_id, epoch in held:
        arguments += (trajectory_id, f"{epoch}:{writer}")
    return _HEARTBEAT((names.ledger, names.leases, names.config), *arguments)


def adopt_command(run: str, trajectory_id: str, *, writer: str) -> Command:
    """Return the call by which a writer adopts a lapsed trajectory; nothing is sent."""
    names = keys.run_keys(run)
    where = (names.ledger, names.leases, names.config, names.groups)
    return _ADOPT(where, trajectory_id, writer)


def list_lapsed_command(
    run: str, *, until_ms: int | None = None, max_count: int = MAX_LAPSED
) -> Command:
    """Return the call that lists lapsed trajectories; nothing is sent."""
    names = keys.run_keys(run)
    where = (names.ledger, names.leases, names.config)
    return _LIST_LAPSED(where, "" if until_ms is None else until_ms, max_count)


def parse_lapsed(reply: Sequence[bytes]) -> list[LapsedTrajectory]:
    """Return the trajectories of the reply of the script list_lapsed."""
    return [
        LapsedTrajectory(
            key=keys.parse_trajectory_id(trajectory_id.decode()),
            writer=keys.decode_name(entry.decode().split(":", 2)[2]),
            epoch=int(entry.split(b":", 2)[1]),
        )
        for trajectory_id, entry in zip(reply[::2], reply[1::2], strict=True)
    ]
