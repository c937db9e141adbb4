"""The leadership of a run: events are folded into groups, and groups planned into batches.

A plan is a function of the events before it, so a new leader makes the plan that the last one was
about to write.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import Final

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import Decision, ReadyGroup
from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.fold.staleness import VersionSteps
from turnstream.batching.merge.plan import Manifest
from turnstream.batching.planning.plan_batch import event_order, num_groups_to_plan
from turnstream.batching.planning.selection import Selector
from turnstream.records.snapshots import PlannerSnapshot
from turnstream.store.run.configs import Revisions
from turnstream.types import BatchDue, ConfigRevised, Event
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.payload import DamagedPayloadError
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.chain import ConfigInForce, PlanChain
from turnstream_server.batcher.planner.decisions import DecisionWriter, FoldBrokenError
from turnstream_server.batcher.planner.listener import LoopShare, RunListener
from turnstream_server.batcher.planner.replanning import answer_replan
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.planner.snapshotting import PlannerSnapshots, Upkeep
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.core.scan import PAGE_EVENTS, EventEntry
from turnstream_server.ledger.leadership.writes import Position, Term
from turnstream_server.ledger.planning.announcements import announce_due, finish_run
from turnstream_server.ledger.planning.manifests import StoredManifest, finish_marking
from turnstream_server.telemetry.instruments import histogram
from turnstream_server.telemetry.tracing import span

logger = logging.getLogger(__name__)

_PLAN_SECONDS = histogram(
    "turnstream_batcher_plan_seconds", "Time to plan, check and write a batch."
)

GATHER_S: Final = 0.004
"""Pause after events, in which more of them come: each read costs as much as fifty events, so that
a thousand trajectories that are sealed one by one would otherwise cost 0.2 CPU seconds."""


class Leader:
    """One term of leading a run, from the replay of its history until it is fenced.

    Attributes:
        is_waiting: whether the leader has handled everything that it read, and waits for events.
    """

    def __init__(
        self,
        term: Term,
        view: RunView,
        assembler: Assembler,
        *,
        revisions: Revisions,
        upkeep: Upkeep,
    ) -> None:
        self.is_waiting = False
        self._term = term
        self._view = view
        self._assembler = assembler
        self._in_force = ConfigInForce(term, revisions)
        self._fold = RunFold(self._config)
        self._selector = Selector(self._config)
        self._listener = RunListener(term.client, term.run, after_step=0)
        self._decisions = DecisionWriter(term)
        self._chain = PlanChain(term, view, self._in_force)
        self._share = LoopShare()
        self._snapshots = PlannerSnapshots(term, assembler, upkeep=upkeep)

    @property
    def _config(self) -> BatchingConfig:
        return self._in_force.config

    @property
    def position(self) -> Position:
        """Return the last entries that were read."""
        return Position(self._listener.position, self._listener.wake_id)

    @property
    def config_revision(self) -> int:
        """Return the number of the config revision in force."""
        return self._in_force.revision

    def undecided(self) -> list[str]:
        """Return the open groups and evaluations, the oldest first."""
        return self._fold.state.undecided

    async def lead(self) -> None:
        """Plan each batch that is due, until an error ends the term.

        Raises:
            FoldBrokenError: an event broke the fold and is rejected: lead with another Leader.
            RecordError: a newer release wrote an event.
        """
        try:
            await self._lead()
        except FoldBrokenError:
            await self._decisions.write()
            raise

    async def _lead(self) -> None:
        await self._decisions.load()
        await finish_marking(self._term)
        self._view.ingested.begin(epoch=self._term.epoch)
        await self._replay()
        await self._view.refresh()
        logger.info(
            "leading run %s from step %d on",
            self._view.run,
            self._chain.next_step,
            extra={"epoch": self._term.epoch},
        )
        while True:
            await self._replan()
            await self._plan_due_batches()
            await self._finish()
            is_due = self._snapshots.is_due(step=self._chain.newest_step)
            if is_due and self._selector.choice is None:  # a choice is not part of a snapshot
                await self._snapshots.save(self._snapshot(), self._fold)
            await self._listen()

    async def _replan(self) -> None:
        """Withdraw plans of damaged payload if that is requested, and restart after them."""
        request = self._view.frontier.replan
        if not request:
            return
        known = self._snapshot()
        if await answer_replan(
            self._term, self._view, self._assembler, request=request, known=known
        ):
            await self._replay()
        await self._view.refresh()

    async def _replay(self) -> None:
        """Fold the history in; each plan takes its groups at the event where it was made."""
        await self._restore()
        planned = await self._read_plans()
        decisions = await self._pass_all(planned, through=self._listener.position)
        while events := await self._listener.read_events():
            for entry in events:
                decisions += await self._apply(entry)
                if planned:
                    decisions += await self._pass_all(planned, through=entry.event_id)
                await self._share.after(entry)
            self._snapshots.count_events(len(events))
            await self._decisions.write()
        await self._carry_out(await self._decisions.without_settled(decisions))

    async def _restore(self) -> None:
        snapshot = await self._snapshots.read()
        if snapshot is None:
            return
        self._in_force.restore(snapshot.config_revision, snapshot.revised_at)
        self._fold = RunFold(self._config, snapshot.fold)
        self._selector = Selector(self._config)
        self._selector.versions = VersionSteps(snapshot.versions, lineage=snapshot.lineage)
        self._selector.pass_step(snapshot.step)
        self._listener.start_after(snapshot.position)
        self._chain.restore(snapshot)

    def _snapshot(self) -> PlannerSnapshot:
        return PlannerSnapshot(
            position=self._listener.position,
            step=self._chain.newest_step,
            manifest_hash=self._chain.hash,
            next_row_id=self._chain.next_row_id,
            fold=self._fold.state,
            versions=self._selector.versions.steps,
            lineage=self._selector.versions.lineage,
            config_revision=self._in_force.revision,
            revised_at=self._in_force.since,
        )

    async def _pass_all(self, planned: deque[StoredManifest], *, through: str) -> list[Decision]:
        """Take the groups of the plans that were made up to an event, and remove these plans."""
        decisions: list[Decision] = []
        last = event_order(through)
        while planned and event_order(planned[0].manifest.last_event_id) <= last:
            decisions += self._pass(planned.popleft().manifest)
            if not planned:
                planned += await self._read_plans()
        return decisions

    async def _read_plans(self) -> deque[StoredManifest]:
        """Return the next existing plans, which the listener does not report."""
        stored = await self._chain.read_on()
        self._listener.pass_step(self._chain.newest_step)
        return stored

    def _pass(self, manifest: Manifest) -> list[Decision]:
        left_over = self._fold.take(manifest.groups)
        self._selector.pass_step(manifest.step)
        return left_over

    async def _listen(self) -> None:
        self.is_waiting = True
        self._view.num_ready = self._fold.num_ready
        news = await self._listener.wait(with_events=True)
        self.is_waiting = False
        await self._take_in(news.events)
        if news.is_frontier_old:
            await self._view.refresh()
        elif len(news.events) < PAGE_EVENTS and not self._due_groups():
            await asyncio.sleep(GATHER_S)

    async def _take_in(self, events: Iterable[EventEntry]) -> None:
        decisions: list[Decision] = []
        for entry in events:
            decisions += await self._apply(entry)
            self._snapshots.count_events(1)
            await self._share.after(entry)
        self._snapshots.forget_groups(self._fold, position=self._listener.position)
        await self._carry_out(decisions)

    async def _apply(self, entry: EventEntry) -> list[Decision]:
        """Fold an event and return the decisions; reject an event that cannot be read or folded."""
        event = self._decisions.read(entry) or self._in_force.revision_of_event(entry.event_id)
        if event is None:
            return []
        if isinstance(event, ConfigRevised):
            await self._in_force.learn(entry.event_id, event)
        self._view.ingested.count(entry.event_id, event)
        try:
            return self._fold_in(entry.event_id, event)
        except Exception as error:  # noqa: BLE001 - raised again where not due to the event
            self._decisions.reject_unfoldable(entry.event_id, event, error)
            return []

    def _fold_in(self, event_id: str, event: Event) -> list[Decision]:
        if isinstance(event, ConfigRevised):
            return self._take_revision(event_id, event)
        decisions = self._fold.apply(event_id, event)
        return [*decisions, *self._selector.apply(event_id, event, self._fold)]

    def _take_revision(self, event_id: str, event: ConfigRevised) -> list[Decision]:
        if not self._in_force.take(event_id, event):
            return []
        self._selector.revise(self._config)
        return self._fold.revise(event_id, self._config)

    async def _carry_out(self, decisions: Iterable[Decision]) -> None:
        """Write the decisions that still hold to the ledger; repeats change nothing."""
        await self._decisions.carry_out(
            [each for each in decisions if self._fold.still_holds(each)]
        )

    async def _plan_due_batches(self) -> None:
        while groups := await self._next_groups():
            if self._config.chooses_by_event and self._selector.choice is None:
                await self._choose()
            elif not await self._plan(groups):
                await self._take_in(await self._listener.read_events())

    async def _finish(self) -> None:
        """Write the end of the run once nothing is left to plan."""
        frontier = self._view.frontier
        while self._fold.is_finished and not frontier.is_finished and frontier.paused is None:
            failpoint("finish_run.before")
            await finish_run(
                self._term, step=self._chain.newest_step, position=self._listener.position
            )
            failpoint("finish_run.after")
            await self._take_in(await self._listener.read_events())
            frontier = await self._view.refresh()

    async def _next_groups(self) -> tuple[ReadyGroup, ...]:
        """Return the groups of the next batch, with the config of its step in force."""
        while 0 < self._view.frontier.next_revision <= self._chain.next_step:
            await self._read_through(await self._in_force.announce(step=self._chain.next_step))
            await self._view.refresh()
        return self._due_groups()

    async def _choose(self) -> None:
        """Write the event at which the groups of the next batch are chosen, and fold it in."""
        failpoint("batch_due.before")
        event_id = await announce_due(self._term, BatchDue(step=self._chain.next_step))
        failpoint("batch_due.after")
        await self._read_through(event_id)

    async def _read_through(self, event_id: str) -> None:
        while event_order(self._listener.position) < event_order(event_id):
            await self._take_in(await self._listener.read_events())

    def _due_groups(self) -> tuple[ReadyGroup, ...]:
        """Return the groups of the next batch; none while it must wait."""
        frontier = self._view.frontier
        last_allowed = frontier.stepped + 1 + self._config.max_planned_ahead
        if frontier.paused is not None or self._chain.next_step > last_allowed:
            return ()
        if self._selector.choice is not None:
            return self._selector.choice.groups
        num_groups = num_groups_to_plan(
            self._fold.num_ready, self._config, is_final=self._fold.is_final
        )
        return self._fold.ready[:num_groups] if num_groups else ()

    async def _plan(self, groups: tuple[ReadyGroup, ...]) -> bool:
        """Plan, check and write the next batch; return False if it must be planned again."""
        with span("plan", run=self._view.run, step=self._chain.next_step), _PLAN_SECONDS.time():
            return await self._plan_and_write(groups)

    async def _plan_and_write(self, groups: tuple[ReadyGroup, ...]) -> bool:
        try:
            stored = await self._assembler.in_thread(
                lambda: self._chain.draft(groups, self._selector.choice)
            )
            manifest = stored.manifest
            batch = PlannedBatch(manifest=manifest, manifest_hash=stored.hash, config=self._config)
            failpoint("plan.before_check")
            await self._assembler.check(batch)
        except DamagedPayloadError as error:
            logger.warning("run %s: %s", self._view.run, error)
            await self._decisions.mark_dead(error.damages)
            return False
        self._prepare(batch)
        failpoint("plan.before_write")
        if not await self._chain.write(stored):
            return False
        failpoint("plan.after_write")
        self._chain.note(stored)
        self._listener.pass_step(manifest.step)
        num_over_age = self._selector.num_over_age(groups, step=manifest.step)
        left_over = self._pass(manifest)
        self._view.offer(batch)
        await self._carry_out(left_over)
        logger.info(
            "planned step %d of run %s",
            manifest.step,
            self._view.run,
            extra={
                "run": self._view.run,
                "step": manifest.step,
                "num_groups": len(groups),
                "num_over_age": num_over_age,
                "manifest_hash": stored.hash,
                "leader_epoch": self._term.epoch,
            },
        )
        self._log_members(manifest)
        self._chain.warn_of(manifest, announced=self._selector.versions.steps)
        return True

    def _log_members(self, manifest: Manifest) -> None:
        if not logger.isEnabledFor(logging.DEBUG):
            return
        for planned in (each for group in manifest.groups for each in group.trajectories):
            trajectory = planned.key.trajectory_id
            facts = {"run": self._view.run, "step": manifest.step, "trajectory": trajectory}
            logger.debug("planned", extra=facts)

    def _prepare(self, batch: PlannedBatch) -> None:
        """Begin to encode the share that a trainer of one rank requests next."""
        frontier = self._view.frontier
        if frontier.session_epoch and frontier.dp_world_size == 1:
            self._assembler.prepare(batch, mini_batch=0, dp_rank=0, dp_world_size=1)
