"""Reads the state of a run from which the reasons for waiting follow, with one script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import redis
import redis.asyncio

from turnstream.errors import TurnstreamError
from turnstream.records.configs import decode_config
from turnstream.store.client import keys
from turnstream.store.client.fullness import parse_bytes, store_trouble
from turnstream.store.client.scripts import Command, Script, run_command, run_command_async
from turnstream.store.client.stored_values import StoredHash, parsed_number, reading
from turnstream.store.run.tasks import prompt_counts
from turnstream.store.waits.wait_snapshot import (
    MAX_NAMED,
    Durations,
    MemberState,
    WaitingMember,
    WaitSnapshot,
    lapsed_writers,
    open_member,
)

MAX_LEASES: Final = 512
"""With more open trajectories no generator counts as gone: an unread lease may last."""

READ_WAITS = Script("read_waits", "turnstream.store.waits")

_UNTRAINED: Final = ("filtered", "expired", "abandoned", "incomplete", "dead")


def waits_command(run: str) -> Command:
    """Return the call of read_waits.lua."""
    names = keys.run_keys(run)
    where = (
        *(names.frontier, names.config, names.leader, names.budget, names.prompts, names.retry),
        *(names.leases, names.ledger, names.refills, names.versions, names.counts),
        names.deadlines,
        *(names.clock, names.times, names.ranks, names.events, names.wake),
    )
    return READ_WAITS(where, MAX_LEASES, MAX_NAMED)


def read_waits(client: redis.Redis, run: str) -> WaitSnapshot | None:
    """Return the state of a run; None if the store cannot return it, because an error needs it."""
    try:
        return parse_waits(run, run_command(client, waits_command(run)))
    except TurnstreamError:
        return None


async def read_waits_async(client: redis.asyncio.Redis, run: str) -> WaitSnapshot | None:
    """The same as `read_waits`, for asyncio."""
    try:
        return parse_waits(run, await run_command_async(client, waits_command(run)))
    except TurnstreamError:
        return None


def parse_waits(run: str, reply: Sequence[Any]) -> WaitSnapshot:
    """Return the state from the reply of the script; CorruptRecordError names a damaged key."""
    names, parts = keys.run_keys(run), _pairs(reply)
    now_ms = int(parts[b"now_ms"])
    frontier = StoredHash(names.frontier, _pairs(parts[b"frontier"]))
    leader = StoredHash(names.leader, _pairs(parts[b"leader"]))
    budget = StoredHash(names.budget, _pairs(parts[b"budget"]))
    ended = StoredHash(names.counts, _pairs(parts[b"counts"]))
    with reading(names.leases):
        members = [*_open_members(parts[b"leases"], now_ms)]
    with reading(names.times):
        durations = _durations(now_ms, frontier.fields, *parts[b"step_times"])
    with reading(names.prompts):
        prompts = prompt_counts(parts[b"prompts"], parts[b"num_again"])
    with reading(names.config):
        config = decode_config(parts[b"config"], run=run)
    used, most, aof_status = parts[b"server"]
    num_live, num_open = frontier.number("live_groups"), frontier.number("open_groups")
    return WaitSnapshot(
        run=run,
        config=config,
        stepped=frontier.number("stepped"),
        announced=frontier.parsed("announced", parsed_number, None),
        planned=frontier.number("planned"),
        planned_groups=frontier.number("planned_groups"),
        released=frontier.number("released"),
        num_live=num_live,
        num_open=num_open,
        num_opened=frontier.number("opened_groups"),
        num_ready=max(0, num_live - num_open - frontier.number("planned_groups")),
        num_waiting=num_open,
        at_plans=frontier.text("at_plans"),
        session_epoch=frontier.number("session_epoch") if frontier.text("session") else 0,
        is_closed=frontier.text("closed") == "1",
        is_finished=frontier.text("finished") == "1",
        leftover=frontier.text("leftover") or "short",
        paused=frontier.parsed("paused", bytes.decode, None),
        damage=frontier.parsed("damaged", _damage, None),
        planner=leader.text("owner"),
        planner_left_s=_lease_left_ms(leader, parts[b"last_ids"], now_ms) / 1_000,
        planning_trouble=leader.text("planning_trouble"),
        release_trouble=leader.text("release_trouble"),
        store_trouble=store_trouble({"aof_last_write_status": (aof_status or b"ok").decode()}),
        budget=parse_bytes(budget, used=int(used), allowed=int(most), max_bytes=config.max_bytes),
        prompts=prompts,
        num_refills=parts[b"num_refills"],
        newest_version=_version(parts[b"version_id"]),
        untrained=tuple((state, n) for state in _UNTRAINED if (n := ended.number(state))),
        members=(*members[:MAX_NAMED], *_granted(_pairs(parts[b"oldest_refills"]), now_ms)),
        lapsed_writers=lapsed_writers(members) if parts[b"num_leases"] <= MAX_LEASES else (),
        durations=durations,
        behind=_ranks_behind(_pairs(parts[b"ranks"]), frontier),
    )


def _pairs(flat: Sequence[Any]) -> dict[bytes, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _lease_left_ms(leader: StoredHash, last_ids: Sequence[bytes], now_ms: int) -> int:
    if leader.text("parked") == b" ".join(last_ids).decode():
        return leader.number("lease_ms")  # an idle run needs no planner
    return leader.parsed("expires_ms", parsed_number, now_ms) - now_ms


def _version(entry_id: bytes) -> int | None:
    return int(entry_id.partition(b"-")[0]) - 1 if entry_id else None


def _damage(value: bytes) -> tuple[int, str]:
    step, _, sentence = value.decode().split(":", 2)
    return int(step), sentence


def _open_members(leases: Sequence[Any], now_ms: int) -> Iterator[WaitingMember]:
    """Yield all open trajectories, the first of them with the deadlines of their groups."""
    for name, end_ms, entry, due_ms in zip(*(leases[i::4] for i in range(4)), strict=True):
        if entry is not None and entry.startswith(b"open:"):
            writer = keys.decode_name(entry.decode().split(":", 2)[2])
            key = keys.parse_trajectory_id(name.decode())
            member = open_member(key, writer, left_ms=int(end_ms) - now_ms)
            due_s = None if due_ms is None else int(due_ms) / 1_000
            yield replace(member, deadline_left_s=due_s)


def _granted(refills: Mapping[bytes, bytes], now_ms: int) -> Iterator[WaitingMember]:
    for name, ms in refills.items():
        key, since_s = keys.parse_trajectory_id(name.decode()), max(0, now_ms - int(ms)) / 1_000
        yield WaitingMember(key=key, state=MemberState.GRANTED, since_s=since_s)


def _durations(
    now_ms: int, frontier: Mapping[bytes, bytes], stepped_ms: bytes | None, planned_ms: bytes | None
) -> Durations:
    """Return the durations from the times of the session, the newest group, and the step.

    A later session has a planned step since its start. A session that ended restarts the wait.

    >>> frontier = {b"session_ms": b"2000", b"opened_ms": b"1000"}
    >>> _durations(9_000, frontier, b"4000", b"5000")
    Durations(trainer_s=4.0, step_s=5.0, opened_s=8.0)
    >>> _durations(9_000, {b"session_ms": b"6000"}, b"4000", None)
    Durations(trainer_s=None, step_s=3.0, opened_s=None)
    """
    session_ms = frontier.get(b"session_ms")
    started = (session_ms, stepped_ms, planned_ms)
    return Durations(
        trainer_s=_since_s(now_ms, started) if planned_ms else None,
        step_s=_since_s(now_ms, (session_ms, stepped_ms)),
        opened_s=_since_s(now_ms, (frontier.get(b"opened_ms"),)),
    )


def _since_s(now_ms: int, times: Iterable[bytes | None]) -> float | None:
    """Return the seconds since the last of these times; 0 after the clock was set back."""
    last_ms = max((int(each) for each in times if each), default=None)
    return None if last_ms is None else max(0, now_ms - last_ms) / 1_000


def _ranks_behind(ranks: Mapping[bytes, bytes], frontier: StoredHash) -> tuple[int, ...]:
    """Return the ranks that have not asked for the planned step that a session awaits.

    Empty for a session of one rank: its rank is the trainer.

    >>> fields = {b"session": b"s", b"planned": b"5", b"stepped": b"4", b"dp_world_size": b"3"}
    >>> ranks = {b"0": b"5:ab", b"stepped:0": b"4:cd", b"2": b"4:cd"}
    >>> _ranks_behind(ranks, StoredHash("frontier", fields))
    (1, 2)
    """
    step, dp_world_size = frontier.number("stepped") + 1, frontier.number("dp_world_size")
    is_offered = frontier.text("session") and frontier.number("planned") >= step
    if not is_offered or dp_world_size < 2:
        return ()
    newest = {
        int(rank): int(has.partition(b":")[0]) for rank, has in ranks.items() if rank.isdigit()
    }
    return tuple(rank for rank in range(dp_world_size) if newest.get(rank, 0) < step)
