"""Lapsed trajectories, which are abandoned if no generator adopts them in time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import redis.asyncio

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.scripts import Script, run_commands_async
from turnstream.store.run.leases import MAX_LAPSED, LapsedTrajectory, list_lapsed_async
from turnstream.types import TrajectoryAbandoned
from turnstream_server.bus.leadership.leadership import LeaderScript, Term
from turnstream_server.bus.planning.trajectories import post_seals_of
from turnstream_server.failpoints import reach

logger = logging.getLogger(__name__)

_GIVE_UP = LeaderScript("give_up", "planning", "ledger leases counts events")
_APPEND = Script("append", "turnstream.generator.outbox")
_FENCE: Final = "given up"
"""Name of the writer that fences the payload of abandoned trajectories."""


async def abandon_lapsed(term: Term, *, until_ms: int) -> bool:
    """Abandon a page of trajectories whose leases ended by then; return whether there are more.

    A trajectory whose seal is stored and not posted is sealed instead, so that no acknowledged
    write is lost. `until_ms` is a time of the store's clock.
    """
    lapsed = await list_lapsed_async(term.client, term.run, until_ms=until_ms)
    if not lapsed:
        return False
    await post_seals_of(term.client, term.run, [each.trajectory_id for each in lapsed])
    reach("give_up.before")
    given_up = await _give_up(term, lapsed, until_ms=until_ms)
    reach("give_up.after")
    await _end_payload(term.client, term.run, given_up)
    for each in given_up:
        logger.warning(
            "run %s: %s is abandoned: %s", term.run, each.key.readable_name, _reason(each)
        )
    return len(lapsed) == MAX_LAPSED


async def _give_up(
    term: Term, lapsed: Sequence[LapsedTrajectory], *, until_ms: int
) -> list[LapsedTrajectory]:
    """Abandon trajectories; return those that were not renewed, adopted or sealed before."""
    arguments: list[Any] = []
    for each in lapsed:
        reason = _reason(each)
        record = encode_event(TrajectoryAbandoned(key=each.key, reason=reason))
        arguments += (each.trajectory_id, each.epoch, reason, record)
    replies = await _GIVE_UP.run(term, until_ms, *arguments)
    return [each for each, was_given_up in zip(lapsed, replies, strict=True) if was_given_up]


async def _end_payload(
    client: redis.asyncio.Redis, run: str, given_up: Sequence[LapsedTrajectory]
) -> None:
    """Fence the payload, so that its writers are refused at their next append."""
    commands = [
        _APPEND(keys.trajectory_keys(run, each.trajectory_id), f"{each.epoch + 1}:{_FENCE}", 0, 0)
        for each in given_up
    ]
    await run_commands_async(client, commands)


def _reason(lapsed: LapsedTrajectory) -> str:
    return f"the lease of {lapsed.writer} ended"
