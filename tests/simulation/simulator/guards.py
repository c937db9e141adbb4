"""Guards of scripts and code, each with the edit that breaks it and the runs that show it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from unittest.mock import patch

from simulator.runs import simulate_all
from simulator.store.lua import Scripts
from simulator.store.store import SCRIPTS
from turnstream.batching.fold.members import GroupMembers
from turnstream.batching.planning.selection import Selector
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.resend import ResendBuffer
from turnstream_server.batcher.planner import releaser
from turnstream_server.batcher.planner.leader import Leader
from turnstream_server.batcher.planner.planner import PinnedClient
from turnstream_server.ledger.leadership.writes import Changes
from turnstream_server.ledger.planning.settling import Attempt
from turnstream_server.ledger.release import release, release_writes
from turnstream_server.ledger.sessions import session_writes

Break = Callable[[], contextlib.AbstractContextManager[Any]]

MOST_SEEDS: Final = 600
"""One of so many runs fails without a guard, with a large margin."""


LATE_SEEDS: Final = 3_000
"""The same for guards whose break shows in fewer than one of 300 runs."""


def first_failed_seed(broken: Break, *, most: int = MOST_SEEDS) -> int | None:
    with broken(), contextlib.closing(simulate_all(range(most))) as runs:
        return next((each.seed for each in runs if each.problems), None)


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
    return lambda: edited(old, new)


def condition(text: str) -> Break:
    """Return an edit of the scripts by which this condition never holds."""
    return script(text, "if false then")


def method(owner: Any, name: str, new: Any) -> Break:
    return lambda: patch.object(owner, name, new)


def both(first: Break, second: Break) -> Break:
    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        with first(), second():
            yield

    return broken


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


async def _all_of(_: Any, __: str, names: list[str]) -> set[str]:
    return set(names)


def _released_as_stored(ended: Iterable[Attempt]) -> Changes | None:
    return release_writes.release_bytes([each._replace(entry=b"sealed:1") for each in ended])


def _without(add: Callable[..., None], field: str) -> Callable[..., None]:
    def add_others(changes: Changes, key: str, name: str, number: int) -> None:
        if name != field:
            add(changes, key, name, number)

    return add_others


def _without_rollback(write: Callable[..., None]) -> Callable[..., None]:
    def write_others(changes: Changes, *words: Any) -> None:
        is_start = words[1:3] == ("frontier", "stepped") and "committed" in words
        write(changes, *words[:2], *words[4 if is_start else 2 :])

    return write_others


async def _meet_any(_: PinnedClient, connection: Any) -> None:
    await connection.on_connect()


GUARDS: Final[dict[str, Break]] = {
    "open_group: capacity": condition("if most - live <= 0 then"),
    "open_group: a trajectory that is open": script(
        "  if writer == WRITER and exclusive == '' then", "  if writer then"
    ),
    "open_group: most open groups": condition(
        "if most_open > 0 and most_open - (open or 0) <= 0 then"
    ),
    "open_group: a prompt that waits is no new one": condition("  if is_repeated then"),
    "heartbeat: the lease is renewed": script(
        "    redis.call('ZADD', LEASES, ends_ms, id)\n    replies", "    replies"
    ),
    "adopt: the next epoch": script(
        "  epoch = epoch + 1\n  redis.call('HSET', LEDGER, id, 'open:'",
        "  redis.call('HSET', LEDGER, id, 'open:'",
    ),
    "post_reward: awaited rewards": condition("if state ~= 'awaiting_reward' or known then"),
    "acquire_leader: the lease of another": script(
        "owner ~= ARGV[1] and tonumber(expires_ms) > now_ms then", "false then"
    ),
    "leader_write: facts that have changed": condition("if refusal then"),
    "plan: the groups of a step": method(Changes, "add", _without(Changes.add, "planned_groups")),
    "release_bytes: bytes of a batch": method(release, "release_bytes", _released_as_stored),
    "start_session: stepped batches come back": method(
        Changes, "write", _without_rollback(Changes.write)
    ),
    "trainer calls: the present session": method(session_writes, "check_session", lambda *_: None),
    "fold: one member per sample": method(GroupMembers, "surplus_reason", lambda *_: ""),
    "selector: chosen groups are planned": method(Selector, "pass_step", lambda *_: None),
    "leader: plans take their groups in the replay": method(Leader, "_pass", lambda *_: []),
    "releaser and compact_ended: a group that may get members": both(
        method(releaser, "finished_groups", _all_of), method(release_writes, "OVER", _Everything())
    ),
    "planner: one start of the store": method(PinnedClient, "_meet", _meet_any),
    "resend buffer: it keeps writes": method(ResendBuffer, "keep", lambda *_, **__: None),
    "outbox: lost writes are sent again": method(Outbox, "_compare_process", lambda *_, **__: None),
    "every script: the epoch of the leader": condition(
        "if ARGV[1] ~= '' and redis.call('HGET', LEADER, 'epoch') ~= ARGV[1] then"
    ),
    "set_closed: a finished run": script(
        "redis.call('HDEL', FRONTIER, 'finished', 'leftover')\n", ""
    ),
    "revise_config: the order of steps": condition("if step < first then"),
    "observed: never falls": script(
        "math.max(tonumber(seen), tonumber(ARGV[2]))", "tonumber(ARGV[2])"
    ),
}
"""Each guard with the edit that breaks it."""
