"""Deadlines that have passed, and leases that have lapsed, written as events."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import redis.asyncio

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Script, run_command_async, run_commands_async
from turnstream.store.run.budget import lease_of_seal
from turnstream.store.run.leases import MAX_LAPSED, LapsedTrajectory, list_lapsed_async
from turnstream.types import DeadlineFired, TrajectoryAbandoned
from turnstream_server.bus.leadership.leadership import LeaderScript, Term
from turnstream_server.bus.leadership.writes import Changes, Difference, read_facts, write_all
from turnstream_server.bus.planning.settling import GroupState, read_group_states
from turnstream_server.failpoints import reach

logger = logging.getLogger(__name__)

_FIRE = LeaderScript("fire_deadlines", "planning", "deadlines members events config rewards")
_ABANDON = LeaderScript("abandon_lapsed", "planning", "ledger leases counts events")
_APPEND = Script("append", "turnstream.generator.outbox")
_POST_SEALED = Script("post_sealed", "turnstream.generator.outbox")
_PER_CALL: Final = 200
_FENCE: Final = "abandoned"
"""Name of the writer that fences the payload of abandoned trajectories."""


async def fire_deadlines(term: Term, *, run_ms: int) -> int:
    """Write the events of all deadlines that have passed at a time of the run's clock.

    Returns:
        Milliseconds until the next one is due; -1 where there is none.
    """
    arguments: list[str | bytes] = []
    while True:
        if arguments:
            reach("fire_deadlines.before")
        _, next_ms, *due = await _FIRE.run(term, run_ms, _PER_CALL, *arguments)
        if arguments:
            reach("fire_deadlines.after")
        if not due:
            return int(next_ms)
        arguments = _with_records(due)


def _with_records(due: Sequence[Any]) -> list[str | bytes]:
    words: list[str | bytes] = []
    for member, num_refills in zip(due[::2], due[1::2], strict=True):
        words += (member, num_refills, encode_event(_event(member.decode(), int(num_refills))))
    return words


def _event(member: str, num_refills: int) -> DeadlineFired:
    kind, _, name = member.partition(":")
    if kind == "group":
        return DeadlineFired(group_id=keys.decode_name(name), num_refills=num_refills)
    awaited = keys.parse_trajectory_id(name)
    return DeadlineFired(group_id=awaited.group_id, awaited=awaited)


async def find_orphaned(term: Term, group_ids: Sequence[str]) -> dict[str, int]:
    """Return the groups of a closed run without a writer, with the refills granted to each."""
    found = await _read_orphaned(term, group_ids)
    return {group_id: group.num_granted for group_id, group in found.items()}


async def end_orphaned(term: Term, orphaned: Mapping[str, int]) -> int:
    """Fire the deadlines of groups without a writer; return their number.

    A group that has a writer since, or another refill, stays as it is.
    """
    changes = [
        fire_orphaned(group)
        for group_id, group in (await _read_orphaned(term, [*orphaned])).items()
        if group.num_granted == orphaned[group_id]
    ]
    found = await write_all(term, changes)
    return sum(not isinstance(each, Difference) for each in found)


def is_orphaned(group: GroupState) -> bool:
    """Return whether no generator holds an undecided group: none of its attempts is open.

    An attempt that waits for its reward holds it too.
    """
    return group.state in {"open", "evaluating"} and not any(
        each.state in {"open", "awaiting_reward"} for each in group.attempts
    )


def fire_orphaned(group: GroupState) -> Changes:
    """Return the writes that fire the deadline of a group of a closed run, if it has no writer."""
    changes = Changes()
    changes.expect("frontier", "closed", b"1")
    changes.expect("groups", group.name, group.entry)
    changes.expect("members", group.name, group.members)
    for each in group.attempts:
        changes.expect("ledger", each.trajectory_id, each.entry)
    group_id = keys.decode_name(group.name)
    event = DeadlineFired(group_id=group_id, num_refills=group.num_granted)
    changes.write_entry("events", encode_event(event))
    changes.write("ZREM", "deadlines", f"group:{group.name}")
    return changes


async def _read_orphaned(term: Term, group_ids: Sequence[str]) -> dict[str, GroupState]:
    frontier = keys.run_keys(term.run).frontier
    if (await read_facts(term, ("HGET", frontier, "closed"))) != [b"1"] or not group_ids:
        return {}
    names = {keys.encode_name(each): () for each in group_ids}
    groups = await read_group_states(term, names)
    return {keys.decode_name(each.name): each for each in groups if is_orphaned(each)}


async def abandon_lapsed(term: Term, *, until_ms: int) -> bool:
    """Abandon a page of trajectories whose leases ended by then; return whether there are more.

    A trajectory whose seal is stored and not posted is sealed instead, so that no acknowledged
    write is lost. `until_ms` is a time of the store's clock.
    """
    lapsed = await list_lapsed_async(term.client, term.run, until_ms=until_ms)
    if not lapsed:
        return False
    await _post_seals(term.client, term.run, [each.key.trajectory_id for each in lapsed])
    reach("abandon_lapsed.before")
    abandoned = await _abandon(term, lapsed, until_ms=until_ms)
    reach("abandon_lapsed.after")
    fences = [
        _APPEND(
            keys.trajectory_keys(term.run, each.key.trajectory_id),
            f"{each.epoch + 1}:{_FENCE}",
            0,
            0,
        )
        for each in abandoned
    ]
    await run_commands_async(term.client, fences)
    for each in abandoned:
        logger.warning(
            "run %s: %s is abandoned: %s", term.run, each.key.readable_name, _reason(each)
        )
    return len(lapsed) == MAX_LAPSED


async def _abandon(
    term: Term, lapsed: Sequence[LapsedTrajectory], *, until_ms: int
) -> list[LapsedTrajectory]:
    """Abandon trajectories; return those that were not renewed, adopted or sealed before."""
    arguments: list[Any] = []
    for each in lapsed:
        reason = _reason(each)
        record = encode_event(TrajectoryAbandoned(key=each.key, reason=reason))
        arguments += (each.key.trajectory_id, each.epoch, reason, record)
    replies = await _ABANDON.run(term, until_ms, *arguments)
    return [each for each, was_abandoned in zip(lapsed, replies, strict=True) if was_abandoned]


def _reason(lapsed: LapsedTrajectory) -> str:
    return f"the lease of {lapsed.writer} ended"


async def _post_seals(client: redis.asyncio.Redis, run: str, ids: Sequence[str]) -> None:
    """Post the stored seals of these open trajectories, as their writers would."""
    pipeline = client.pipeline(transaction=False)
    for name in ids:
        meta = keys.trajectory_keys(run, name).meta
        pipeline.execute_command("HMGET", meta, "sealed", "epoch", "writer")
    with translating():
        metas: list[Any] = await pipeline.execute()
        sealed = [(name, meta) for name, meta in zip(ids, metas, strict=True) if meta[0] == b"1"]
        pipeline = client.pipeline(transaction=False)
        for name, _ in sealed:
            turns = keys.trajectory_keys(run, name).turns
            pipeline.execute_command("XREVRANGE", turns, "+", "-", "COUNT", 1)
        last_entries: list[Any] = await pipeline.execute()
    for (name, (_, epoch, writer)), entries in zip(sealed, last_entries, strict=True):
        if entries:  # none, where a disk lost them
            seal = entries[0][1][b"r"]
            words = (name, lease_of_seal(int(epoch), writer.decode(), seal), seal)
            await run_command_async(client, _POST_SEALED(keys.run_keys(run).of_post_sealed, *words))
