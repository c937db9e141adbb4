"""Requests to plan again after damage, their answers, and the writes of a withdrawal."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import redis

from turnstream.batching.merge.plan import Manifest
from turnstream.errors import ConflictError, NotReadyError
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import StoredHash, parsed_number
from turnstream.types import PlansWithdrawn, TrajectoryDied, TrajectoryKey
from turnstream_server.ledger.core.frontier import NONE_WITHDRAWN, Withdrawn
from turnstream_server.ledger.core.run_script import RunScript
from turnstream_server.ledger.leadership.leadership import Term
from turnstream_server.ledger.leadership.writes import Changes, read_facts, time_ms
from turnstream_server.ledger.planning.dead_writes import write_death
from turnstream_server.ledger.planning.plan_writes import read_planned_groups
from turnstream_server.ledger.planning.settling import GroupState

_REQUEST = RunScript("request_replan", "planning", "frontier wake")
_FRONTIER: Final = ("planned", "stepped", "session_epoch", "withdrawn")


class Withdrawal(NamedTuple):
    """The plans to withdraw, their trajectories, and the planner before them.

    `dead` has the reasons of damaged trajectories, `epochs` the lease epochs of all others.
    `position` is the last event in `snapshot`.
    """

    request: str
    manifests: Sequence[Manifest]
    dead: Mapping[TrajectoryKey, str]
    epochs: Mapping[TrajectoryKey, int]
    position: str
    snapshot: bytes

    @property
    def text(self) -> str:
        """Return the steps and the number of damaged trajectories."""
        first, newest = self.manifests[0].step, self.manifests[-1].step
        return f"steps {first} to {newest}; damaged trajectories: {len(self.dead)}"


class WithdrawalFacts(NamedTuple):
    """The facts in the store about a withdrawal; `before` is the position of the snapshot."""

    frontier: StoredHash
    config: Mapping[bytes, bytes]
    observers: Mapping[bytes, bytes]
    before: bytes | None
    groups: Sequence[GroupState]
    now_ms: int


def request_replan(client: redis.Redis, run: str) -> str:
    """Request a replan from the first damaged step on; return the name of the pending request."""
    name: bytes = _REQUEST.call(client, run, uuid.uuid4().hex)
    return name.decode()


def await_replan(client: redis.Redis, run: str, request: str, *, wait_s: float) -> str:
    """Wait for the answer to a request; return the steps that are planned again.

    Raises:
        ConflictError: the leader refuses the request.
        NotReadyError: no leader has answered; the request stays.
    """
    end_s = time.monotonic() + wait_s
    while True:
        with translating():
            answer: Any = client.hget(keys.run_keys(run).frontier, "replanned")
        name, _, text = (answer or b"").decode().partition(":")
        if name == request:
            content: dict[str, str] = json.loads(text)
            if "refused" in content:
                raise ConflictError(content["refused"])
            return content.get("done", text)  # an earlier release has other fields
        if time.monotonic() >= end_s:
            raise NotReadyError(
                f"no batcher has answered within {wait_s:g} s; the request is kept, and the next "
                f"batcher that plans run {run!r} executes it"
            )
        time.sleep(0.2)


async def read_withdrawal(term: Term, asked: Withdrawal) -> WithdrawalFacts:
    """Return the facts about plans to withdraw."""
    known = keys.run_keys(term.run)
    hashes = (known.frontier, known.config, known.observers)
    *found, before, now = await read_facts(
        term,
        *(("HGETALL", key) for key in hashes),
        ("HGET", known.snapshot, "position"),
        ("TIME",),
    )
    groups = [group for manifest in asked.manifests for group in manifest.groups]
    states = await read_planned_groups(term, groups)
    frontier = StoredHash(known.frontier, found[0])
    return WithdrawalFacts(frontier, found[1], found[2], before, states, time_ms(now))


def answered(request: str, **content: str) -> Changes:
    """Return the writes that answer a pending request: `refused` or `done`, and a sentence."""
    changes = Changes()
    changes.expect("frontier", "replan", request.encode())
    changes.write("HDEL", "frontier", "replan")
    changes.write("HSET", "frontier", "replanned", f"{request}:{json.dumps(content)}")
    changes.wake()
    return changes


def withdraw(facts: WithdrawalFacts, asked: Withdrawal) -> Changes | None:
    """Return the writes that withdraw plans; None where the request is not pending any more.

    Damaged trajectories are dead, the others are sealed again, and their groups are decided. The
    trainer session ends, so that no rank mixes withdrawn batches with new ones.

    Raises:
        ConflictError: a step is stepped, or a trajectory or a group is not planned.
    """
    if facts.frontier.text("replan") != asked.request:
        return None
    first = asked.manifests[0].step
    if first <= facts.frontier.number("stepped"):
        raise ConflictError(f"step {first} is stepped, and stays as it was planned")
    changes = answered(asked.request, done=asked.text)
    for field in _FRONTIER:
        changes.expect("frontier", field, facts.frontier.fields.get(field.encode()))
    _return_groups(changes, facts, asked)
    _remove_steps(changes, facts, first=first, newest=asked.manifests[-1].step)
    changes.expect_size("observers", len(facts.observers))
    for name, entry in facts.observers.items():
        changes.expect("observers", name.decode(), entry)
        seen, _, rest = entry.decode().partition(":")
        if int(seen) >= first:
            changes.write("HSET", "observers", name.decode(), f"{first - 1}:{rest}")
    if facts.before not in {None, asked.position.encode()}:
        changes.write("HSET", "snapshot", "before", facts.before or b"")
    for field in ("position", "withdrawn_at"):
        changes.write("HSET", "snapshot", field, asked.position)
    changes.write("HSET", "snapshot", "step", first - 1, "record", asked.snapshot)
    changes.write_entry("events", encode_event(PlansWithdrawn(step=first, dead=(*asked.dead,))))
    return changes


def _return_groups(changes: Changes, facts: WithdrawalFacts, asked: Withdrawal) -> None:
    for group in facts.groups:
        if {group.state, *(each.state for each in group.attempts)} != {"planned"}:
            name = keys.decode_name(group.name)
            raise ConflictError(f"group {name!r}, or a trajectory of it, is not planned")
        changes.expect("groups", group.name, group.entry)
        changes.write("HSET", "groups", group.name, f"{group.num_samples}:decided")
    attempts = {each.trajectory_id: each for group in facts.groups for each in group.attempts}
    for key, reason in asked.dead.items():
        died = TrajectoryDied(key=key, reason=reason)
        write_death(changes, attempts[keys.trajectory_id(key)], died, now_ms=facts.now_ms)
    sealed = {keys.trajectory_id(key): f"sealed:{epoch}" for key, epoch in asked.epochs.items()}
    changes.expect_prefix("ledger", "planned:", [*sealed])
    changes.write_each("HSET", "ledger", [word for pair in sealed.items() for word in pair])
    num_bytes = sum(each.stored_bytes for each in attempts.values())
    for state, sign in (("planned", -1), ("sealed", 1)):
        changes.add("counts", state, sign * len(sealed))
    for state, sign in (("planned", -1), ("stored", 1)):
        changes.add("budget", state, sign * num_bytes)
    changes.add("frontier", "planned_groups", -len(facts.groups))


def _remove_steps(changes: Changes, facts: WithdrawalFacts, *, first: int, newest: int) -> None:
    steps = [str(step) for step in range(first, newest + 1)]
    withdrawn = facts.frontier.parsed("withdrawn", Withdrawn.parse, NONE_WITHDRAWN)
    revision, through = withdrawn.revision + 1, max(newest, withdrawn.through_step)
    changes.write("CUT", "plan", f"{first}-0")
    changes.write_each("HDEL", "batches", steps)
    changes.write_each("HDEL", "times", [f"planned:{step}" for step in steps])
    epoch = facts.frontier.number("session_epoch") + 1
    changes.write("HDEL", "frontier", "damaged", "finished", "at_plans")
    changes.write(
        *("HSET", "frontier", "planned", first - 1, "withdrawn", f"{revision}:{through}"),
        *("session_epoch", epoch, "session", "", "session_ms", facts.now_ms),
    )
    for number in range(2, parsed_number(facts.config[b"newest"]) + 1):
        if parsed_number(facts.config[b"from:%d" % number]) > first:  # it applies earlier now
            changes.write("HSET", "config", f"from:{number}", first)
