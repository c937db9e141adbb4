"""Breaks the guards of the scripts and of the fold one by one, and counts the lives until it is seen.

python -m simulator.guards                  every guard
python -m simulator.guards append           those whose name begins so
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

from simulator.lives import lives
from simulator.lua import Scripts
from turnstream.batching.readiness import RunFold
from turnstream.batching.selection import Selector
from turnstream_server.batcher import releaser, settling
from turnstream_server.batcher.leader import Leader

MAX_SEEDS = 100

Break = Callable[[], contextlib.AbstractContextManager[Any]]


class Guard(NamedTuple):
    """A guard and how it is broken."""

    name: str
    broken: Break


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

    scripts = _scripts()
    before = dict(scripts.by_sha)
    scripts.by_sha.clear()
    try:
        with patch.object(Scripts, "load", load_edited):
            yield
    finally:
        scripts.by_sha.clear()
        scripts.by_sha.update(before)
    if not num_edited:
        raise AssertionError(f"no script that was used has {old!r}")


def _scripts() -> Scripts:
    from simulator.store import _SCRIPTS

    return _SCRIPTS


def script(old: str, new: str) -> Break:
    """A break of the scripts."""
    return lambda: edited(old, new)


def method(owner: type[Any], name: str, new: Any) -> Break:
    """A break of the code."""
    return lambda: patch.object(owner, name, new)


async def _nothing(*_: Any, **__: Any) -> set[str]:
    return set()


async def _all_of(_: Any, __: str, names: list[str]) -> set[str]:
    return set(names)


def _never_heard(self: RunFold, event_id: str, event: Any) -> list[Any]:
    group = self._groups.get(event.key.group_id)
    return self._late(event.key) if group is None else self._place(event_id, group, event)


_IS_OPEN = (
    "if state == 'open' and (rest == epoch .. writer\n"
    "      or writer == '' and string.match(rest, '^%d+') == epoch) then"
)
_IS_ANOTHERS = "if string.match(rest, '^%d+') ~= ARGV[2] and rest ~= ARGV[2] then"

GUARDS = (
    # the payload of a trajectory
    Guard(
        "append: the epoch of the writer",
        script("if holder and holder ~= epoch and not (", "if false and ("),
    ),
    Guard(
        "append: a turn that is stored already",
        script("local num_known = math.min(turns - first, num_turns)", "local num_known = 0"),
    ),
    Guard(
        "append: the tombstone of a released trajectory",
        script(
            "if released then\n  return redis.error_reply('FENCED the trajectory is over",
            "if false then\n  return redis.error_reply('FENCED the trajectory is over",
        ),
    ),
    Guard(
        "append: the first call of another writer",
        script("if holder == epoch and is_first_call and writer ~= caller then", "if false then"),
    ),
    # the ledger
    Guard("open_group: capacity", script("if most - live <= 0 then", "if false then")),
    Guard("open_group: a name is used once", script("if was_over(ARGV[1]) then", "if false then")),
    Guard(
        "open_group: a trajectory that is open",
        script(
            "    if writer == ARGV[3] then\n      replies[i] = tonumber(epoch)",
            "    if writer then\n      replies[i] = tonumber(epoch)",
        ),
    ),
    Guard(
        "open_group: a group that is decided",
        script(
            "  elseif state ~= begins then\n    replies[i] = 'CONFLICT group '",
            "  elseif false then\n    replies[i] = 'CONFLICT group '",
        ),
    ),
    Guard(
        "post_sealed: the epoch of the lease",
        script(_IS_OPEN, "if state == 'open' then"),
    ),
    Guard(
        "post_sealed: a seal counts once",
        script(_IS_OPEN, "if state and string.match(rest, '^%d+') == epoch then"),
    ),
    Guard(
        "post_sealed: a group that is decided",
        script("    if is_decided(id) then", "    if false then"),
    ),
    Guard(
        "abandon: the epoch of the lease",
        script(_IS_ANOTHERS, "if false then"),
    ),
    Guard(
        "abandon: what is sealed",
        script(
            "if state ~= 'open' then\n  return redis.error_reply('CONFLICT ' .. ARGV[1] .. ' is already ' .. state)\nend\n"
            + _IS_ANOTHERS,
            "if string.match(rest, '^%d+') ~= string.match(ARGV[2], '^%d+') then",
        ),
    ),
    Guard(
        "take_over: the lease has ended",
        script(
            "  if left_ms > 0 then\n    return redis.error_reply('HELD",
            "  if false then\n    return redis.error_reply('HELD",
        ),
    ),
    Guard(
        "take_over: the next epoch",
        script(
            "  epoch = epoch + 1\n  redis.call('HSET', KEYS[1], id, 'open:'",
            "  redis.call('HSET', KEYS[1], id, 'open:'",
        ),
    ),
    Guard(
        "give_up: the lease was renewed", script("and lease_end <= tonumber(ARGV[2]) then", "then")
    ),
    Guard(
        "give_up: the epoch of the lease",
        script("if epoch == ARGV[i + 1] and lease_end", "if lease_end"),
    ),
    Guard(
        "heartbeat: the lease is renewed",
        script("      redis.call('ZADD', KEYS[2], lease_end, id)\n      replies", "      replies"),
    ),
    Guard(
        "post_reward: a reward counts once",
        script("if known then\n  if known == ARGV[2]", "if false then\n  if known == ARGV[2]"),
    ),
    Guard(
        "post_reward: what awaits none",
        script("if state ~= 'awaiting_reward' then", "if false then"),
    ),
    # the plan
    Guard(
        "every script: the epoch of the leader",
        script("if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then", "if false then"),
    ),
    Guard(
        "acquire_leader: the lease of another",
        script("owner ~= ARGV[1] and tonumber(expires_ms) > now_ms then", "false then"),
    ),
    Guard(
        "acquire_leader: the next epoch",
        script(
            "if owner ~= ARGV[1] then\n  epoch = epoch + 1", "if false then\n  epoch = epoch + 1"
        ),
    ),
    Guard(
        "write_manifest: the next step",
        script("if step >= 1 and step <= last then", "if false then"),
    ),
    Guard("write_manifest: the chain", script("if last_hash ~= ARGV[4] then", "if false then")),
    Guard(
        "write_manifest: what is sealed",
        script(
            "    if not entry or string.sub(entry, 1, 7) ~= 'sealed:' then", "    if false then"
        ),
    ),
    Guard(
        "write_manifest: what is left open", script("  if num_left[state] then", "  if false then")
    ),
    Guard(
        "settle_group: once",
        script("if state == ARGV[3] or (not is_dropped and state ~= 'open') then", "if false then"),
    ),
    Guard(
        "settle_group: a group that is planned",
        script(
            "if state ~= 'open' and not (is_dropped and state == 'decided') then", "if false then"
        ),
    ),
    Guard(
        "settle_members: what is sealed",
        script("  if state == 'sealed' or state == 'awaiting_reward' then", "  if state then"),
    ),
    Guard("grant_refill: once", script("if number <= tonumber(granted) then", "if false then")),
    Guard(
        "grant_refill: an attempt that was opened",
        script("if redis.call('HEXISTS', KEYS[3], ARGV[4]) == 1 or", "if"),
    ),
    Guard(
        "fire_deadlines: a refill moved it",
        script("and num_refills(ARGV[i]) == ARGV[i + 1] then", "then"),
    ),
    Guard(
        "settle_group: bytes of what was never begun",
        script("    elseif from == '' then\n      give_back(id)\n", ""),
    ),
    Guard(
        "give_back: bytes of a batch",
        script("if string.sub(entries[i] or '', 1, 8) == 'planned:' then", "if false then"),
    ),
    # the trainer
    Guard(
        "stepped: the epoch of the session",
        script(
            "if epoch ~= ARGV[1] then\n  return redis.error_reply('FENCED trainer session ' .. ARGV[1]",
            "if false then\n  return redis.error_reply('FENCED trainer session ' .. ARGV[1]",
        ),
    ),
    Guard("stepped: a step counts once", script("if step == stepped + 1 then", "if true then")),
    Guard("committed: never falls", script("if step <= tonumber(committed) then", "if false then")),
    Guard(
        "start_session: what was stepped comes back",
        script(
            "redis.call('HSET', KEYS[1], 'stepped', step, 'committed', step,",
            "redis.call('HSET', KEYS[1], 'committed', step,",
        ),
    ),
    Guard(
        "start_session: another session was begun since",
        script("local over = redis.call('HGET', KEYS[4], ARGV[1])", "local over = false"),
    ),
    # what is over
    Guard(
        "raise_floor: the checkpoints that are kept",
        script(
            "local first_kept = math.max(1, #steps - (config.retain_checkpoints or 2) + 1)",
            "local first_kept = math.max(1, #steps)",
        ),
    ),
    Guard(
        "finish_batch: the snapshot",
        script(
            "if step > tonumber(redis.call('HGET', KEYS[6], 'step') or 0) then", "if false then"
        ),
    ),
    Guard(
        "fold_ended: a record counts once",
        script("if tonumber(ARGV[2]) <= newest then", "if false then"),
    ),
    Guard(
        "fold_ended: a group that may change",
        script("  if not IS_OVER[state] then", "  if false then"),
    ),
    Guard(
        "trim_events: one snapshot behind",
        script(
            "if before ~= ARGV[2] then\n  redis.call('HSET', KEYS[2], 'before', before)",
            "if true then\n  redis.call('HSET', KEYS[2], 'before', ARGV[2] .. '9')",
        ),
    ),
    # the fold and its leader
    Guard("fold: a seal is heard once", method(RunFold, "_seal", _never_heard)),
    Guard("fold: a decision that no longer holds", method(RunFold, "still_holds", lambda *_: True)),
    Guard("fold: one member per sample", method(RunFold, "_why_surplus", lambda *_: "")),
    Guard("selector: what was chosen is planned", method(Selector, "pass_step", lambda *_: None)),
    Guard("leader: plans take their groups in the replay", method(Leader, "_pass", lambda *_: [])),
    Guard(
        "leader: a group that is gone was settled",
        lambda: patch.object(settling, "groups_that_are_gone", _nothing),
    ),
    Guard(
        "releaser: a group that may get members",
        lambda: patch.object(releaser, "groups_that_are_over", _all_of),
    ),
)


def seeds_until_seen(guard: Guard, *, max_seeds: int = MAX_SEEDS) -> tuple[int, str] | None:
    """How many lives it took until one went wrong, and how; None where none did."""
    with guard.broken():
        for verdict in lives(range(max_seeds)):
            if verdict.problems:
                return verdict.seed + 1, verdict.problems[0].splitlines()[0]
    return None


def main(names: list[str]) -> int:
    """Break them; 1 where one was not seen."""
    num_unseen = 0
    for guard in GUARDS:
        if names and not guard.name.startswith(tuple(names)):
            continue
        try:
            seen = seeds_until_seen(guard)
        except Exception as error:  # noqa: BLE001 - a broken guard may break anything
            seen = (1, f"{error!r}")
        num_unseen += seen is None
        print(
            f"{seen[0] if seen else '-':>4}  {guard.name}  ({seen[1][:90] if seen else 'unseen'})",
            flush=True,
        )
    return 1 if num_unseen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
