"""Trajectories that were sealed and will not be trained, because of what became of their group."""

from __future__ import annotations

from collections.abc import Sequence

import redis.asyncio

from turnstream.batching.readiness import GroupDropped
from turnstream.store import keys
from turnstream.store.scripts import Command, Script, run_commands_async

_SETTLE = Script("settle_group", "turnstream_server.bus")


async def settle_groups(
    client: redis.asyncio.Redis, run: str, dropped: Sequence[GroupDropped], *, leader_epoch: int
) -> None:
    """End sealed trajectories as filtered, incomplete or surplus; a dropped group makes room.

    Each entry is settled whole or not at all, once: settling it again changes nothing.

    Raises:
        FencedError: another planner leads the run.
        ConflictError: a group is in a batch already, or was never opened.
        StoreUnavailableError: the store cannot be reached.
    """
    if not dropped:
        return
    commands = [_settle(run, group, leader_epoch) for group in dropped]
    for reply in await run_commands_async(client, commands):
        if isinstance(reply, Exception):
            raise reply


def _settle(run: str, group: GroupDropped, leader_epoch: int) -> Command:
    names = keys.run_keys(run)
    return _SETTLE(
        (names.leader, names.groups, names.ledger, names.counts, names.frontier, names.wake),
        leader_epoch,
        keys.encode_name(group.group_id),
        group.state,
        group.reason,
        *(keys.trajectory_id(key) for key in group.keys),
    )
