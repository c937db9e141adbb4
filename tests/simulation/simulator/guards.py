"""Guards of scripts and code, each with the edit that breaks it and the runs that show it."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

from simulator.lua import Scripts
from simulator.runs import simulate_all
from simulator.schedules import draw_schedule
from simulator.store import SCRIPTS
from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.planning.selection import Selector
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.resend import ResendBuffer
from turnstream_server.batcher.planner import releaser
from turnstream_server.batcher.planner.leader import Leader
from turnstream_server.bus.core.server_instance import PinnedClient

Break = Callable[[], contextlib.AbstractContextManager[Any]]


class Guard(NamedTuple):
    """A guard and the edit that breaks it.

    Attributes:
        num_seeds: number of runs of which one fails without the guard, with a large margin.
        broken: context manager, within which the guard is broken.
        needs: attribute of `Schedule` that a run needs to show it, such as `has_reviser`; "" for any
            run.
    """

    name: str
    num_seeds: int
    broken: Break
    needs: str = ""

    def first_failed_seed(self) -> int | None:
        """Return the first seed whose run fails while the guard is broken."""
        with self.broken():
            for verdict in simulate_all(filter(self._is_suitable, range(self.num_seeds))):
                if verdict.problems:
                    return verdict.seed
        return None

    def _is_suitable(self, seed: int) -> bool:
        return not self.needs or getattr(draw_schedule(random.Random(seed)), self.needs)


@contextlib.contextmanager
def edited(old: str, new: str) -> Iterator[None]:
    """Within, every script in which `old` stands has `new` in its place."""
    load = Scripts.load
    num_edited = 0

    def load_edited(scripts: Scripts, source: bytes) -> bytes:
        nonlocal num_edited
        text = source.replace(old.encode(), new.encode())
        if text == source:
            return load(scripts, source)
        num_edited += 1
        sha = load(scripts, text)
        own = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        scripts.by_sha[own] = scripts.by_sha[sha]
        return own

    before = dict(SCRIPTS.by_sha)
    SCRIPTS.by_sha.clear()
    try:
        with patch.object(Scripts, "load", load_edited):
            yield
    finally:
        SCRIPTS.by_sha.clear()
        SCRIPTS.by_sha.update(before)
    if not num_edited:
        raise AssertionError(f"no script that was used has {old!r}")


def script(old: str, new: str) -> Break:
    """Return an edit of the scripts."""
    return lambda: edited(old, new)


def method(owner: Any, name: str, new: Any) -> Break:
    """Return a replacement of a method or function."""
    return lambda: patch.object(owner, name, new)


async def _all_of(_: Any, __: str, names: list[str]) -> set[str]:
    return set(names)


async def _meet_any(_: PinnedClient, connection: Any) -> None:
    await connection.on_connect()


GUARDS = (
    Guard("open_group: capacity", 120, script("if most - live <= 0 then", "if false then")),
    Guard(
        "open_group: a trajectory that is open",
        160,
        script(
            "    if writer == ARGV[3] then\n      replies[i] = tonumber(epoch)",
            "    if writer then\n      replies[i] = tonumber(epoch)",
        ),
    ),
    Guard(
        "open_group: groups that are open at a time",
        160,
        script("if most_open > 0 and most_open - (open or 0) <= 0 then", "if false then"),
    ),
    Guard(
        "open_task: a prompt that waits is no new one",
        400,
        script("  if is_repeated then", "  if false then"),
    ),
    Guard(
        "heartbeat: the lease is renewed",
        240,
        script("      redis.call('ZADD', KEYS[2], ends_ms, id)\n      replies", "      replies"),
    ),
    Guard(
        "take_over: the next epoch",
        160,
        script(
            "  epoch = epoch + 1\n  redis.call('HSET', KEYS[1], id, 'open:'",
            "  redis.call('HSET', KEYS[1], id, 'open:'",
        ),
    ),
    Guard(
        "post_reward: what awaits none",
        160,
        script("if state ~= 'awaiting_reward' or known then", "if false then"),
    ),
    Guard(
        "acquire_leader: the lease of another",
        80,
        script("owner ~= ARGV[1] and tonumber(expires_ms) > now_ms then", "false then"),
    ),
    Guard("write_manifest: the next step", 600, script("if step <= last then", "if false then")),
    Guard(
        "give_back: bytes of a batch",
        160,
        script("if string.sub(entries[i] or '', 1, 8) == 'planned:' then", "if false then"),
    ),
    Guard(
        "start_session: what was stepped comes back",
        240,
        script(
            "redis.call('HSET', FRONTIER, 'stepped', step, 'committed', step,",
            "redis.call('HSET', FRONTIER, 'committed', step,",
        ),
    ),
    Guard("fold: one member per sample", 160, method(RunFold, "_why_surplus", lambda *_: "")),
    Guard(
        "selector: what was chosen is planned", 40, method(Selector, "pass_step", lambda *_: None)
    ),
    Guard(
        "leader: plans take their groups in the replay", 160, method(Leader, "_pass", lambda *_: [])
    ),
    Guard(
        "releaser: a group that may get members",
        160,
        method(releaser, "finished_groups", _all_of),
    ),
    Guard(
        "planner: what belongs to one start of the store",
        500,
        method(PinnedClient, "_meet", _meet_any),
        needs="may_lose",
    ),
    Guard(
        "window: what may be lost is kept", 160, method(ResendBuffer, "keep", lambda *_, **__: None)
    ),
    Guard(
        "outbox: what was lost is sent again",
        200,
        method(Outbox, "_compare_server", lambda *_, **__: None),
    ),
    Guard(
        "every script: the epoch of the leader",
        160,
        script("if redis.call('HGET', LEADER, 'epoch') ~= ARGV[1] then", "if false then"),
    ),
    Guard(
        "reopen_run: what was finished",
        240,
        script("redis.call('HDEL', KEYS[1], 'finished', 'leftover')\n", ""),
        needs="has_reopener",
    ),
    Guard(
        "revise_config: the order of steps",
        600,
        script("if step < first then", "if false then"),
        needs="has_reviser",
    ),
    Guard(
        "write_manifest: the groups of a step",
        40,
        script("'planned_groups', num_groups)", "'planned_groups', 0)"),
    ),
    Guard(
        "observed: never falls",
        400,
        script("math.max(tonumber(seen), tonumber(ARGV[2]))", "tonumber(ARGV[2])"),
        needs="has_observer",
    ),
)
