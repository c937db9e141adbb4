"""Damage that is found after planning: the plans from there on are withdrawn and made again.

A leader does it on request. One write withdraws the plans and stores a snapshot of a planner before
them. This leader and all later ones continue from that snapshot, so all make equal plans.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from turnstream.batching.fold.withdrawing import state_before, with_planned_reward
from turnstream.batching.merge.plan import Manifest
from turnstream.errors import ConflictError, RecordError
from turnstream.records.events import encode_event
from turnstream.records.snapshots import PlannerSnapshot, encode_snapshot
from turnstream.store.client import keys
from turnstream.store.client.stored_values import StoredHash, parsed_number
from turnstream.types import PlansWithdrawn, SealedTrajectory, TrajectoryDied, TrajectoryKey
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.core.frontier import NONE_WITHDRAWN, Withdrawn
from turnstream_server.ledger.leadership.writes import (
    Changes,
    Term,
    read_facts,
    time_ms,
    write,
    write_decision,
)
from turnstream_server.ledger.planning.announcements import answered
from turnstream_server.ledger.planning.plan_writes import move_trajectories, read_planned_groups
from turnstream_server.ledger.planning.settling import GroupState
from turnstream_server.ledger.planning.trajectories import read_seals, write_death

logger = logging.getLogger(__name__)

MAX_WITHDRAWN: Final = 4_000
"""Trajectories of the plans that one call withdraws: about 30 ms of the store."""


class Withdrawal(NamedTuple):
    """Plans to withdraw, and the planner before them with the events up to `position`.

    `dead` has the reasons of damaged trajectories, `epochs` the lease epochs of all others.
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


async def answer_replan(
    term: Term, view: RunView, assembler: Assembler, *, request: str, known: PlannerSnapshot
) -> bool:
    """Execute or refuse a request; return whether the leader must restart from its snapshot.

    `known` is the leader's state, which must not change during the call.
    """
    try:
        asked = await _prepare(term, view, assembler, request=request, known=known)
        failpoint("replan.before_write")
        await write_decision(
            term, lambda: read_withdrawal(term, asked), lambda facts: withdraw(facts, asked)
        )
        failpoint("replan.after_write")
    except (ConflictError, RecordError) as error:
        logger.warning("run %s is not planned again: %s", view.run, error)
        await write(term, answered(request, refused=str(error)))
        return False
    facts = {"num_dead": len(asked.dead), "leader_epoch": term.epoch}
    logger.warning("run %s: plans are withdrawn: %s", view.run, asked.text, extra=facts)
    return True


async def _prepare(
    term: Term, view: RunView, assembler: Assembler, *, request: str, known: PlannerSnapshot
) -> Withdrawal:
    frontier = await view.refresh()
    batches: list[PlannedBatch] = []
    dead: dict[TrajectoryKey, str] = {}
    for step in range(frontier.stepped + 1, frontier.planned + 1):
        batch = await view.batch(step)
        dead |= {each.key: each.reason for each in await assembler.examine(batch)}
        if dead:
            batches.append(batch)
    if not dead:
        raise ConflictError(f"no payload after step {frontier.stepped} is damaged")
    first, manifests = batches[0].manifest, [batch.manifest for batch in batches]
    number = sum(each.num_trajectories for each in manifests)
    if number > MAX_WITHDRAWN:
        raise ConflictError(
            f"{number} trajectories are planned from step {first.step} on, and at most "
            f"{MAX_WITHDRAWN} are planned again: continue in a fork (`turnstream run fork`)"
        )
    members = await _read_members(term, batches, dead)
    before = replace(
        known,
        step=first.step - 1,
        manifest_hash=first.previous_hash,
        next_row_id=first.mini_batches[0].first_row_id,
        fold=state_before(manifests, members, known.fold),
    )
    snapshot = await assembler.in_thread(lambda: encode_snapshot(before))
    epochs = {key: sealed.lease_epoch for key, sealed in members.items()}
    return Withdrawal(request, manifests, dead, epochs, known.position, snapshot)


async def _read_members(
    term: Term, batches: Sequence[PlannedBatch], dead: dict[TrajectoryKey, str]
) -> dict[TrajectoryKey, SealedTrajectory]:
    """Return the trajectories as they were sealed; add those without a seal to `dead`."""
    groups = [(group, batch.config) for batch in batches for group in batch.manifest.groups]
    plans = {each.key: (each, config) for group, config in groups for each in group.trajectories}
    intact = [key for key in plans if key not in dead]
    members: dict[TrajectoryKey, SealedTrajectory] = {}
    for key, seal in (await read_seals(term.client, term.run, intact)).items():
        plan, config = plans[key]
        if isinstance(seal, RecordError):
            dead[key] = f"its seal cannot be read: {seal}"
        elif seal.payload_crcs != plan.payload_crcs:
            dead[key] = "its seal is not the one that it was planned with"
        else:
            members[key] = with_planned_reward(seal, plan, config=config)
    return members


async def read_withdrawal(term: Term, asked: Withdrawal) -> WithdrawalFacts:
    """Return the facts about plans to withdraw."""
    known = keys.run_keys(term.run)
    groups = [group for manifest in asked.manifests for group in manifest.groups]
    frontier, config, observers, before, now = await read_facts(
        term,
        ("HGETALL", known.frontier),
        ("HGETALL", known.config),
        ("HGETALL", known.observers),
        ("HGET", known.snapshot, "position"),
        ("TIME",),
    )
    states = await read_planned_groups(term, groups)
    stored = StoredHash(known.frontier, frontier)
    return WithdrawalFacts(stored, config, observers, before, states, time_ms(now))


def withdraw(facts: WithdrawalFacts, asked: Withdrawal) -> Changes | None:
    """Return the writes that withdraw plans; None where the request is not pending any more.

    Damaged trajectories are dead, the others are sealed again, and their groups are decided. The
    trainer session ends, so that no rank mixes withdrawn batches with new ones.
    """
    if facts.frontier.text("replan") != asked.request:
        return None
    first = asked.manifests[0].step
    if first <= facts.frontier.number("stepped"):
        raise ConflictError(f"step {first} is stepped, and stays as it was planned")
    changes = answered(asked.request, done=asked.text)
    for field in ("planned", "stepped", "session_epoch", "withdrawn"):
        changes.expect("frontier", field, facts.frontier.fields.get(field.encode()))
    _return_groups(changes, facts, asked)
    _remove_steps(changes, facts, first=first, newest=asked.manifests[-1].step)
    changes.expect_hash("observers", facts.observers)
    for name, entry in facts.observers.items():
        seen, _, rest = entry.decode().partition(":")
        if int(seen) >= first:
            changes.write("HSET", "observers", name.decode(), f"{first - 1}:{rest}")
    if facts.before not in {None, asked.position.encode()}:
        changes.write("HSET", "snapshot", "before", facts.before or b"")
    words = ("position", asked.position, "withdrawn_at", asked.position)
    changes.write("HSET", "snapshot", *words, "step", first - 1, "record", asked.snapshot)
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
    num_bytes = sum(each.stored_bytes for each in attempts.values())
    changes.expect_prefix("ledger", "planned:", [*sealed])
    move_trajectories(changes, sealed, num_planned=-len(sealed), num_bytes=-num_bytes)
    changes.add("frontier", "planned_groups", -len(facts.groups))


def _remove_steps(changes: Changes, facts: WithdrawalFacts, *, first: int, newest: int) -> None:
    steps = [str(step) for step in range(first, newest + 1)]
    before = facts.frontier.parsed("withdrawn", Withdrawn.parse, NONE_WITHDRAWN)
    withdrawn = f"{before.revision + 1}:{max(newest, before.through_step)}"
    changes.write("CUT", "plan", f"{first}-0")
    changes.write_each("HDEL", "batches", steps)
    changes.write_each("HDEL", "times", [f"planned:{step}" for step in steps])
    changes.write("HDEL", "frontier", "damaged", "finished", "at_plans")
    epoch = facts.frontier.number("session_epoch") + 1
    session = ("session_epoch", epoch, "session", "", "session_ms", facts.now_ms)
    changes.write("HSET", "frontier", "planned", first - 1, "withdrawn", withdrawn, *session)
    for number in range(2, parsed_number(facts.config[b"newest"]) + 1):
        if parsed_number(facts.config[b"from:%d" % number]) > first:  # it applies earlier now
            changes.write("HSET", "config", f"from:{number}", first)
