"""Damage that is found after planning: the plans from there on are withdrawn and made again.

A leader does it on request. One write withdraws the plans and stores a snapshot of a planner before
them. This leader and all later ones continue from that snapshot, so all make equal plans.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from turnstream.batching.fold.withdrawing import state_before, with_planned_reward
from turnstream.batching.merge.plan import Manifest
from turnstream.errors import ConflictError, RecordError
from turnstream.records.snapshots import PlannerSnapshot, encode_snapshot
from turnstream.types import SealedTrajectory, TrajectoryKey
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.leadership.leadership import Term
from turnstream_server.ledger.leadership.writes import write, write_decision
from turnstream_server.ledger.planning.replans import (
    Withdrawal,
    answered,
    read_withdrawal,
    withdraw,
)
from turnstream_server.ledger.planning.trajectories import read_seals

logger = logging.getLogger(__name__)

MAX_WITHDRAWN: Final = 4_000
"""Trajectories of the plans that one call withdraws: about 30 ms of the store."""


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


def check_size(manifests: Sequence[Manifest]) -> None:
    """Check that plans have at most MAX_WITHDRAWN trajectories.

    Raises:
        ConflictError: they have more.
    """
    number = sum(each.num_trajectories for each in manifests)
    if number > MAX_WITHDRAWN:
        raise ConflictError(
            f"{number} trajectories are planned from step {manifests[0].step} on, and at most "
            f"{MAX_WITHDRAWN} are planned again: continue in a fork (`turnstream run fork`)"
        )


async def _prepare(
    term: Term, view: RunView, assembler: Assembler, *, request: str, known: PlannerSnapshot
) -> Withdrawal:
    """Return the withdrawal, and the state of a planner that made none of these plans."""
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
    manifests = [batch.manifest for batch in batches]
    check_size(manifests)
    members = await _read_members(term, batches, dead)
    before = replace(
        known,
        step=manifests[0].step - 1,
        manifest_hash=manifests[0].previous_hash,
        next_row_id=manifests[0].mini_batches[0].first_row_id,
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
