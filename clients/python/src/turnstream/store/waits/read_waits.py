"""Reads the state of a run from which the reasons for waiting follow, with one script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import redis
import redis.asyncio

from turnstream.errors import TurnstreamError
from turnstream.records.configs import decode_config
from turnstream.store.client import keys
from turnstream.store.client.fullness import FIRST_ESTIMATE, store_trouble
from turnstream.store.client.scripts import Command, Script, run_command, run_command_async
from turnstream.store.client.stored_values import StoredHash, parsed_number, reading
from turnstream.store.waits.wait_durations import durations, ranks_behind
from turnstream.store.waits.wait_snapshot import (
    MAX_NAMED,
    OpenMember,
    WaitingGroup,
    WaitSnapshot,
    lapsed_writers,
)

MAX_LEASES: Final = 512
"""With more open trajectories no generator counts as gone: an unread lease may last."""

READ_WAITS = Script("read_waits", "turnstream.store.waits")

_UNTRAINED: Final = ("filtered", "expired", "abandoned", "incomplete", "dead")


def waits_command(run: str) -> Command:
    """Return the call of read_waits.lua."""
    names = keys.run_keys(run)
    where = (
        *(names.frontier, names.config, names.leader, names.budget, names.prompts, names.again),
        *(names.leases, names.ledger, names.refills, names.versions, names.counts),
        names.deadlines,
        *(names.clock, names.times, names.ranks, names.events, names.wake),
    )
    return READ_WAITS(where, MAX_LEASES, MAX_NAMED)


def read_waits(client: redis.Redis, run: str) -> WaitSnapshot | None:
    """Return the state of a run; None if the store cannot return it.

    It accompanies an error, and must not hide it.
    """
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
    """Return the state from the reply of the script.

    Raises:
        CorruptRecordError: a field is damaged; names its key.
        RecordError: the config is of a newer release.
    """
    names = keys.run_keys(run)
    now, fields, config, leader, budget, counts, *reply = reply
    prompts, num_again, num_refills, refills, version_id, memory, *reply = reply
    num_leases, members, step_ms, ranks = reply
    now_ms = int(now)
    frontier, ended = _Fields(names.frontier, fields), _Fields(names.counts, counts)
    progress = _progress(frontier)
    with reading(names.leases):
        open_members, groups = _groups(members, now_ms)
    with reading(names.times):
        lasting = durations(now_ms, frontier.of("session_ms"), frontier.of("opened_ms"), *step_ms)
    with reading(names.config):
        found_config = decode_config(config, run=run)
    has_offer = progress["session_epoch"] > 0 and progress["planned"] > progress["stepped"]
    return WaitSnapshot(
        run=run,
        config=found_config,
        **progress,
        **_planner(_Fields(names.leader, leader), now_ms),
        **_bytes(_Fields(names.budget, budget), memory),
        **_prompts(_Fields(names.prompts, prompts), num_again),
        num_refills=num_refills,
        refills=tuple(
            (keys.parse_trajectory_id(name.decode()), max(0, now_ms - int(ms)) / 1_000)
            for name, ms in zip(refills[::2], refills[1::2], strict=True)
        ),
        newest_version=None if version_id is None else int(version_id.partition(b"-")[0]) - 1,
        untrained=tuple((state, n) for state in _UNTRAINED if (n := ended.number(state))),
        groups=groups,
        lapsed_writers=lapsed_writers(open_members) if num_leases <= MAX_LEASES else (),
        durations=lasting,
        behind=ranks_behind(
            dict(zip(ranks[::2], ranks[1::2], strict=True)),
            dp_world_size=frontier.number("dp_world_size") if has_offer else 0,
            step=progress["stepped"] + 1,
        ),
    )


class _Fields:
    """The fields of a hash, from the flat reply of HGETALL."""

    def __init__(self, key: str, reply: Sequence[bytes]) -> None:
        self.hash = StoredHash(key, dict(zip(reply[::2], reply[1::2], strict=True)))

    def number(self, name: str) -> int:
        """Return a whole number; 0 where the field is missing."""
        return self.hash.parsed(name, parsed_number, 0)

    def text(self, name: str) -> str:
        """Return a text; empty where the field is missing."""
        return self.hash.parsed(name, bytes.decode, "")

    def of(self, name: str) -> bytes | None:
        """Return the stored bytes of a field."""
        return self.hash.fields.get(name.encode())


def _progress(frontier: _Fields) -> dict[str, Any]:
    planned_groups = frontier.number("planned_groups")
    num_live, num_open = frontier.number("live_groups"), frontier.number("open_groups")
    return {
        "stepped": frontier.number("stepped"),
        "planned": frontier.number("planned"),
        "planned_groups": planned_groups,
        "released": frontier.number("released"),
        "num_live": num_live,
        "num_open": num_open,
        "num_opened": frontier.number("opened_groups"),
        "num_revised": frontier.number("revised_groups"),
        "num_ready": max(0, num_live - num_open - planned_groups),
        "num_waiting": num_open,
        "at_plans": frontier.text("at_plans"),
        "session_epoch": frontier.number("session_epoch") if frontier.text("session") else 0,
        "is_closed": frontier.text("closed") == "1",
        "is_finished": frontier.text("finished") == "1",
        "leftover": frontier.text("leftover") or "short",
        "paused": frontier.hash.parsed("paused", bytes.decode, None),
        "damage": frontier.hash.parsed("damaged", _damage, None),
    }


def _bytes(budget: _Fields, memory: Sequence[Any]) -> dict[str, Any]:
    used, most, aof_status = memory
    status = (aof_status or b"ok").decode()
    return {
        "reserved": budget.number("reserved"),
        "stored": budget.number("stored"),
        "planned_bytes": budget.number("planned"),
        "estimate": budget.hash.parsed("estimate", parsed_number, FIRST_ESTIMATE),
        "server_used": int(used),
        "server_max": int(most),
        "store_trouble": store_trouble({"aof_last_write_status": status}),
    }


def _prompts(prompts: _Fields, num_again: int) -> dict[str, Any]:
    added, last, done = (prompts.number(name) for name in ("added", "next", "done"))
    return {
        "prompts_added": added,
        "prompts_left": added - last + num_again,
        "prompts_given": last - num_again - done,
        "prompts_filtered": prompts.number("filtered"),
    }


def _planner(leader: _Fields, now_ms: int) -> dict[str, Any]:
    expires_ms = leader.hash.parsed("expires_ms", parsed_number, now_ms)
    return {
        "planner": leader.text("owner"),
        "planner_left_s": (expires_ms - now_ms) / 1_000,
        "planning_trouble": leader.text("planning_trouble"),
        "release_trouble": leader.text("release_trouble"),
    }


def _damage(value: bytes) -> tuple[int, str]:
    step, _, sentence = value.decode().split(":", 2)
    return int(step), sentence


def _groups(
    members: Sequence[Any], now_ms: int
) -> tuple[list[OpenMember], tuple[WaitingGroup, ...]]:
    """Return all open trajectories, and the first of them with their groups."""
    found: list[OpenMember] = []
    groups: list[WaitingGroup] = []
    for name, end_ms, entry, left_ms in zip(*(members[i::4] for i in range(4)), strict=True):
        if entry is None or not entry.startswith(b"open:"):
            continue
        key = keys.parse_trajectory_id(name.decode())
        writer = keys.decode_name(entry.decode().split(":", 2)[2])
        member = OpenMember(key=key, writer=writer, lease_left_s=(int(end_ms) - now_ms) / 1_000)
        found.append(member)
        if len(groups) < MAX_NAMED:
            due_s = None if left_ms is None else int(left_ms) / 1_000
            groups.append(
                WaitingGroup(group_id=key.group_id, deadline_left_s=due_s, open_members=(member,))
            )
    return found, tuple(groups)
