"""Damage that is found after planning: the plans from there on are withdrawn and made again.

A leader does it on request. One write withdraws the plans and stores a snapshot of a planner before
them. This leader and all later ones continue from that snapshot, so all make equal plans.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.withdrawing import with_planned_reward, withdrawn_groups
from turnstream.batching.merge.plan import Manifest, TrajectoryPlan
from turnstream.errors import ConflictError, RecordError
from turnstream.records.snapshots import PlannerSnapshot, encode_snapshot
from turnstream.store.client import keys
from turnstream.types import SealedTrajectory, TrajectoryDied, TrajectoryKey
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.payload import Damage
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.bus.core.frontier import ReplanRequest
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.planning.replans import (
    MAX_NAMED,
    Withdrawal,
    refuse_replan,
    withdraw_plans,
)
from turnstream_server.bus.planning.seals import read_posted_rewards, read_seals
from turnstream_server.failpoints import reach

logger = logging.getLogger(__name__)

_Members = dict[TrajectoryKey, SealedTrajectory]


class Replanner:
    """Answers requests to plan again, for one term of a run's leader.

    Args:
        term: the leader's term.
        view: this replica's view of the run.
        assembler: reads and checks payload.
    """

    def __init__(self, term: Term, view: RunView, assembler: Assembler) -> None:
        self._term = term
        self._view = view
        self._assembler = assembler

    async def answer(
        self, request: ReplanRequest, known: PlannerSnapshot, *, config: BatchingConfig
    ) -> bool:
        """Execute or refuse a request; return whether plans were withdrawn.

        Then the leader restarts from its snapshot.

        Args:
            request: the pending request.
            known: the leader's state, which must not change during the call.
            config: the config of the leader's next plan.
        """
        try:
            batches, damages = await self._examine(request)
            withdrawal = await self._prepare(batches, damages, known, config)
            reach("replan.before_write")
            await withdraw_plans(self._term, request, withdrawal)
            reach("replan.after_write")
        except (ConflictError, RecordError) as error:
            logger.warning("run %s is not planned again: %s", self._view.run, error)
            await refuse_replan(self._term, request, str(error))
            return False
        self._warn_of(withdrawal)
        return True

    async def _examine(
        self, request: ReplanRequest
    ) -> tuple[list[PlannedBatch], dict[TrajectoryKey, str]]:
        """The batches from the damaged step on, and what of them is damaged.

        Raises:
            ConflictError: nothing is.
        """
        frontier = await self._view.refresh()
        first = request.step or frontier.stepped + 1
        if first <= frontier.stepped:
            raise ConflictError(f"step {first} is stepped, and stays as it was planned")
        if first > frontier.planned:
            raise ConflictError(f"step {first} is not planned; {frontier.planned} are")
        batches: list[PlannedBatch] = []
        damages: list[Damage] = []
        for step in range(first, frontier.planned + 1):
            batch = await self._view.batch(step)
            found = await self._assembler.examine(batch)
            if not damages and not found and (request.step or step == frontier.planned):
                whole = f"step {first}" if request.step else f"steps {first} to {step}"
                raise ConflictError(f"no payload of {whole} is damaged")
            damages += found
            if damages:
                batches.append(batch)
        return batches, {damage.key: damage.reason for damage in damages}

    async def _prepare(
        self,
        batches: Sequence[PlannedBatch],
        damages: dict[TrajectoryKey, str],
        known: PlannerSnapshot,
        config: BatchingConfig,
    ) -> Withdrawal:
        plans = {each.key: (each, batch) for batch in batches for each in _plans(batch.manifest)}
        seals = await read_seals(self._term.client, self._term.run, list(plans))
        dead = dict(damages)
        members: _Members = {}
        for key, (plan, _) in plans.items():
            seal = seals[key]
            if key in damages:
                continue
            if isinstance(seal, RecordError):
                dead[key] = f"its seal cannot be read: {seal}"
            elif seal.payload_crcs != plan.payload_crcs:
                dead[key] = "its seal is not the one that it was planned with"
            else:
                members[key] = seal
        late = {key for key, sealed in members.items() if sealed.awaits_reward}
        posted = await read_posted_rewards(self._term.client, self._term.run, late)
        for key in late:
            plan, batch = plans[key]
            members[key] = with_planned_reward(
                members[key], plan, posted=posted.get(key), config=batch.config
            )
        manifests = [batch.manifest for batch in batches]
        snapshot = await self._assembler.in_thread(
            lambda: encode_snapshot(_before(manifests, members, known, config))
        )
        return Withdrawal(
            manifests=manifests,
            manifest_hashes=[batch.manifest_hash for batch in batches],
            dead=[TrajectoryDied(key=key, reason=reason) for key, reason in dead.items()],
            lease_epochs={key: sealed.lease_epoch for key, sealed in members.items()},
            position=known.position,
            snapshot=snapshot,
        )

    def _warn_of(self, withdrawal: Withdrawal) -> None:
        first, newest = withdrawal.manifests[0].step, withdrawal.manifests[-1].step
        names = [keys.trajectory_id(died.key) for died in withdrawal.dead]
        logger.warning(
            "run %s: the plans of steps %d to %d are withdrawn, its trainer session has ended: "
            "damaged payload of %s",
            self._view.run,
            first,
            newest,
            ", ".join(names[:MAX_NAMED]),
            extra={"num_dead": len(names), "leader_epoch": self._term.epoch},
        )


def _plans(manifest: Manifest) -> list[TrajectoryPlan]:
    return [plan for group in manifest.groups for plan in group.trajectories]


def _before(
    manifests: Sequence[Manifest],
    members: _Members,
    known: PlannerSnapshot,
    config: BatchingConfig,
) -> PlannerSnapshot:
    """Return the state of a planner that has read as many events and made none of these plans."""
    first = manifests[0]
    fold = known.restore_fold(config)
    fold.put_back(withdrawn_groups(manifests, members))
    return replace(
        known,
        step=first.step - 1,
        manifest_hash=first.previous_hash,
        next_row_id=first.mini_batches[0].first_row_id,
        fold=fold.snapshot(),
    )
