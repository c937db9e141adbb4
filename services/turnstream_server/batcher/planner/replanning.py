"""Damage that is found after planning: the plans from there on are withdrawn and made again.

A leader does it on request. One write withdraws the plans and stores a snapshot of a planner before
them. This leader and all later ones continue from that snapshot, so all make equal plans.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from turnstream.batching.fold.withdrawing import state_before, with_planned_reward
from turnstream.batching.merge.plan import Manifest
from turnstream.errors import ConflictError, RecordError
from turnstream.records.snapshots import PlannerSnapshot, encode_snapshot
from turnstream.store.client import keys
from turnstream.types import SealedTrajectory, TrajectoryDied, TrajectoryKey
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.planning.replans import (
    MAX_NAMED,
    MAX_WITHDRAWN,
    Withdrawal,
    refuse_replan,
    withdraw_plans,
)
from turnstream_server.bus.planning.trajectories import read_posted_rewards, read_seals
from turnstream_server.failpoints import reach

logger = logging.getLogger(__name__)


def check_size(manifests: Sequence[Manifest]) -> None:
    """Check that plans are not too large to be withdrawn at once.

    Raises:
        ConflictError: they have more than MAX_WITHDRAWN trajectories.
    """
    number = sum(each.num_trajectories for each in manifests)
    if number > MAX_WITHDRAWN:
        raise ConflictError(
            f"steps {manifests[0].step} to {manifests[-1].step} have {number} trajectories, and at "
            f"most {MAX_WITHDRAWN} are planned again: continue in a fork of the run, which begins "
            "after its last checkpoint"
        )


class Replanner:
    """Answers requests to plan again, for one term of a run's leader."""

    def __init__(self, term: Term, view: RunView, assembler: Assembler) -> None:
        self._term = term
        self._view = view
        self._assembler = assembler

    async def answer(self, request: str, known: PlannerSnapshot) -> bool:
        """Execute or refuse a request; return whether the leader must restart from its snapshot.

        `known` is the leader's state, which must not change during the call.
        """
        try:
            batches, dead = await self._examine()
            withdrawal = await self._prepare(batches, dead, known)
            reach("replan.before_write")
            await withdraw_plans(self._term, request, withdrawal)
            reach("replan.after_write")
        except (ConflictError, RecordError) as error:
            logger.warning("run %s is not planned again: %s", self._view.run, error)
            await refuse_replan(self._term, request, str(error))
            return False
        names = [keys.trajectory_id(died.key) for died in withdrawal.dead]
        logger.warning(
            "run %s: the plans of steps %d to %d are withdrawn, its trainer session has ended: "
            "damaged payload of %s",
            self._view.run,
            batches[0].manifest.step,
            batches[-1].manifest.step,
            ", ".join(names[:MAX_NAMED]),
            extra={"num_dead": len(names), "leader_epoch": self._term.epoch},
        )
        return True

    async def _examine(self) -> tuple[list[PlannedBatch], dict[TrajectoryKey, str]]:
        """Return the batches from the damaged step on, and why their trajectories are damaged."""
        frontier = await self._view.refresh()
        batches: list[PlannedBatch] = []
        dead: dict[TrajectoryKey, str] = {}
        for step in range(frontier.stepped + 1, frontier.planned + 1):
            batch = await self._view.batch(step)
            dead |= {each.key: each.reason for each in await self._assembler.examine(batch)}
            if dead:
                batches.append(batch)
        if not dead:
            raise ConflictError(f"no payload after step {frontier.stepped} is damaged")
        return batches, dead

    async def _prepare(
        self,
        batches: Sequence[PlannedBatch],
        dead: dict[TrajectoryKey, str],
        known: PlannerSnapshot,
    ) -> Withdrawal:
        """Return the withdrawal, and the state of a planner that made none of these plans."""
        manifests = [batch.manifest for batch in batches]
        check_size(manifests)
        members = await self._read_members(batches, dead)
        first = manifests[0]
        before = replace(
            known,
            step=first.step - 1,
            manifest_hash=first.previous_hash,
            next_row_id=first.mini_batches[0].first_row_id,
            fold=state_before(manifests, members, known.fold),
        )
        return Withdrawal(
            first_step=first.step,
            newest_step=manifests[-1].step,
            manifest_hash=batches[-1].manifest_hash,
            dead=[TrajectoryDied(key=key, reason=reason) for key, reason in dead.items()],
            lease_epochs={key: sealed.lease_epoch for key, sealed in members.items()},
            position=known.position,
            snapshot=await self._assembler.in_thread(lambda: encode_snapshot(before)),
        )

    async def _read_members(
        self, batches: Sequence[PlannedBatch], dead: dict[TrajectoryKey, str]
    ) -> dict[TrajectoryKey, SealedTrajectory]:
        """Return the trajectories as they were sealed; add those without a seal to `dead`."""
        plans = {
            plan.key: (plan, batch.config)
            for batch in batches
            for group in batch.manifest.groups
            for plan in group.trajectories
            if plan.key not in dead
        }
        members: dict[TrajectoryKey, SealedTrajectory] = {}
        seals = await read_seals(self._term.client, self._term.run, list(plans))
        for key, seal in seals.items():
            if isinstance(seal, RecordError):
                dead[key] = f"its seal cannot be read: {seal}"
            elif seal.payload_crcs != plans[key][0].payload_crcs:
                dead[key] = "its seal is not the one that it was planned with"
            else:
                members[key] = seal
        late = {key for key, sealed in members.items() if sealed.awaits_reward}
        posted = await read_posted_rewards(self._term.client, self._term.run, late)
        for key in late:
            plan, config = plans[key]
            sealed = members[key]
            members[key] = with_planned_reward(sealed, plan, posted=posted.get(key), config=config)
        return members
