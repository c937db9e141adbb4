"""Deadlines that have passed, and leases that have lapsed, written as events."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import redis.asyncio

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Script, run_command_async, run_commands_async
from turnstream.store.run.configs import read_config_async
from turnstream.store.run.groups import (
    MAX_LAPSED,
    LapsedTrajectory,
    lease_of_seal,
    list_lapsed_async,
)
from turnstream.types import DeadlineFired, TrajectoryAbandoned
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.leadership.writes import (
    Changes,
    Difference,
    Term,
    read_facts,
    time_ms,
    write_all,
)
from turnstream_server.ledger.planning.settling import (
    Attempt,
    GroupState,
    end_attempts,
    read_group_states,
)

logger = logging.getLogger(__name__)

_APPEND = Script("append", "turnstream.generator.outbox")
_POST_SEALED = Script("post_sealed", "turnstream.generator.outbox")
DEADLINES_PER_CALL: Final = 200
"""Deadlines of one round trip."""

_PAGE: Final = ("LIMIT", 0, DEADLINES_PER_CALL)
_FENCE: Final = "abandoned"
"""Name of the writer that fences the payload of abandoned trajectories."""


class Deadline(NamedTuple):
    """A member of `deadlines`, its score, and the entry of its group in `members`."""

    member: str
    due_ms: bytes
    members: bytes | None = None


async def fire_deadlines(term: Term, *, run_ms: int) -> int:
    """Write the events of all passed deadlines; return the ms until the next one, or -1."""
    known = keys.run_keys(term.run)
    while True:
        due, first, last = await read_facts(
            term,
            ("ZRANGEBYSCORE", known.deadlines, "-inf", run_ms, "WITHSCORES", *_PAGE),
            ("ZRANGE", known.deadlines, 0, 0, "WITHSCORES"),
            ("ZRANGE", known.deadlines, -1, -1, "WITHSCORES"),
        )
        if due:
            found = await _read_deadlines(term, due)
            failpoint("fire_deadlines.before")
            await write_all(term, [fire(each) for each in found])
            failpoint("fire_deadlines.after")
        elif not last or not await _limit_deadlines(term, run_ms=run_ms, last_ms=float(last[1])):
            return int(float(first[1])) - run_ms if first else -1


async def _read_deadlines(term: Term, due: Sequence[bytes]) -> list[Deadline]:
    """Return deadlines, of which `due` has the members and scores, with their groups' entries."""
    members = [each.decode() for each in due[::2]]
    names = [each.partition(":")[2] for each in members]  # a reward's is the name of no group
    (entries,) = await read_facts(term, ("HMGET", keys.run_keys(term.run).members, *names))
    return [Deadline(*each) for each in zip(members, due[1::2], entries, strict=True)]


def fire(due: Deadline) -> Changes:
    """Return the writes that fire a deadline, if it has not moved, and its group got no refill.

    >>> list(fire(Deadline("reward:g/0/0", b"9")).calls())  # doctest: +ELLIPSIS
    [('SCORE', 'deadlines', ('reward:g/0/0', b'9')), ('HSET', 'rewards', ('g/0/0', 'missed')), ...
    """
    kind, _, name = due.member.partition(":")
    changes = Changes()
    changes.expect_score("deadlines", due.member, due.due_ms)
    if kind == "group":
        num_refills = GroupState(name, None, due.members, None).num_granted
        changes.expect("members", name, due.members)
        event = DeadlineFired(group_id=keys.decode_name(name), num_refills=num_refills)
    else:
        changes.write("HSET", "rewards", name, "missed")
        awaited = keys.parse_trajectory_id(name)
        event = DeadlineFired(group_id=awaited.group_id, awaited=awaited)
    changes.write("ZREM", "deadlines", due.member)
    changes.write_entry("events", encode_event(event))
    return changes


async def _limit_deadlines(term: Term, *, run_ms: int, last_ms: float) -> bool:
    """Let no deadline be later than one that is set now; return whether one was."""
    revision, config = await read_config_async(term.client, term.run)
    longest_s = max(config.group_deadline_s, config.reward_deadline_s)
    latest_ms = run_ms + round(longest_s * 1_000)
    if not longest_s or last_ms <= latest_ms:
        return False
    known = keys.run_keys(term.run)
    (late,) = await read_facts(
        term, ("ZRANGEBYSCORE", known.deadlines, f"({latest_ms}", "+inf", *_PAGE)
    )
    if late:  # not fired or decided since
        await write_all(term, [limit(late, latest_ms=latest_ms, revision=revision)])
    return True


def limit(late: Sequence[bytes], *, latest_ms: int, revision: int) -> Changes:
    """Return the writes that move deadlines to an earlier time, while this config is in force.

    >>> list(limit([b"group:g"], latest_ms=9, revision=2).calls())[1]
    ('ZADD', 'deadlines', ('XX', 'LT', 9, b'group:g'))
    """
    changes = Changes()
    changes.expect("config", "newest", b"%d" % revision)
    words = [word for each in late for word in (latest_ms, each)]
    changes.write("ZADD", "deadlines", "XX", "LT", *words)
    return changes


async def find_orphaned(term: Term, group_ids: Sequence[str]) -> dict[str, GroupState]:
    """Return the groups of a closed run without a writer, by their ids."""
    frontier = keys.run_keys(term.run).frontier
    if (await read_facts(term, ("HGET", frontier, "closed"))) != [b"1"] or not group_ids:
        return {}
    names = {keys.encode_name(each): () for each in group_ids}
    groups = await read_group_states(term, names)
    return {keys.decode_name(each.name): each for each in groups if is_orphaned(each)}


async def end_orphaned(term: Term, groups: Iterable[GroupState]) -> int:
    """Fire the deadlines of groups that still have no writer; return their number."""
    found = await write_all(term, [fire_orphaned(group) for group in groups])
    return sum(not isinstance(each, Difference) for each in found)


def is_orphaned(group: GroupState) -> bool:
    """Return whether a group is undecided, and none of its attempts is open or awaits a reward."""
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


async def abandon_lapsed(term: Term, *, until_ms: int) -> bool:
    """Abandon a page of trajectories whose leases ended by then; return whether there are more.

    A trajectory whose seal is stored and not posted is sealed instead, so that no acknowledged
    write is lost. `until_ms` is a time of the store's clock.
    """
    lapsed = await list_lapsed_async(term.client, term.run, until_ms=until_ms)
    if not lapsed:
        return False
    await _post_seals(term.client, term.run, [each.key.trajectory_id for each in lapsed])
    failpoint("abandon_lapsed.before")
    abandoned = await end_lapsed(term, lapsed, until_ms=until_ms)
    failpoint("abandon_lapsed.after")
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


async def end_lapsed(
    term: Term, lapsed: Sequence[LapsedTrajectory], *, until_ms: int
) -> list[LapsedTrajectory]:
    """Abandon trajectories; return those that were not renewed, adopted or sealed before."""
    leases = keys.run_keys(term.run).leases
    words = ("ZRANGEBYSCORE", leases, "-inf", until_ms, "WITHSCORES", "LIMIT", 0, MAX_LAPSED)
    page, now = await read_facts(term, words, ("TIME",))
    ends: dict[bytes, bytes] = dict(zip(page[::2], page[1::2], strict=True))
    if time_ms(now) < until_ms:
        return []
    ended = [each for each in lapsed if each.key.trajectory_id.encode() in ends]
    changes = [abandon(each, end_ms=ends[each.key.trajectory_id.encode()]) for each in ended]
    found = await write_all(term, changes)
    pairs = zip(ended, found, strict=True)
    return [each for each, written in pairs if not isinstance(written, Difference)]


def abandon(lapsed: LapsedTrajectory, *, end_ms: bytes) -> Changes:
    """Return the writes that abandon a trajectory, if its lease is the one that ended at `end_ms`.

    >>> from turnstream.types import TrajectoryKey
    >>> one = LapsedTrajectory(key=TrajectoryKey("g", 0), writer="w", epoch=1)
    >>> list(abandon(one, end_ms=b"9").calls())[:2]
    [('FIELDS', 'ledger', ('g/0/0', b'=open:1:w')), ('SCORE', 'leases', ('g/0/0', b'9'))]
    """
    changes = Changes()
    changes.expect_score("leases", lapsed.key.trajectory_id, end_ms)
    entry = f"open:{lapsed.epoch}:{keys.encode_name(lapsed.writer)}".encode()
    attempt = Attempt(lapsed.key.trajectory_id, entry, None)
    reason = _reason(lapsed)
    end_attempts(changes, [attempt], becomes={"open": "abandoned"}, reason=reason)
    event = TrajectoryAbandoned(key=lapsed.key, reason=reason)
    changes.write_entry("events", encode_event(event))
    return changes


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
