"""Leading a run: its events folded into groups, its groups planned into batches, one by one.

A plan is a function of the events before it, so a leader that starts anew comes to the plan that
the one before it was about to write.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

import redis.asyncio

from turnstream.batching.config import BatchingConfig
from turnstream.batching.decisions import GroupEvaluated
from turnstream.batching.plan import Manifest
from turnstream.batching.planning import num_groups_to_plan, plan_batch
from turnstream.batching.readiness import (
    Decision,
    GroupCut,
    GroupDropped,
    MemberDropped,
    ReadyGroup,
    RefillWanted,
    RunFold,
    WaitingGroup,
)
from turnstream.batching.report import plan_report
from turnstream.batching.selection import Selector
from turnstream.batching.staleness import VersionSteps
from turnstream.errors import ConflictError
from turnstream.records.snapshots import PlannerSnapshot
from turnstream.store import keys
from turnstream.store.revisions import Revisions
from turnstream.types import BatchDue, ConfigRevised
from turnstream_server.batcher.assembler import Assembler
from turnstream_server.batcher.letters import LetterBox
from turnstream_server.batcher.listener import PAGE_EVENTS, EventEntry, RunListener
from turnstream_server.batcher.memory import PlannerMemory, event_position
from turnstream_server.batcher.payload import DamagedPayloadError
from turnstream_server.batcher.revising import ConfigInForce
from turnstream_server.batcher.runs import RunView
from turnstream_server.batcher.shares import PlannedBatch
from turnstream_server.batcher.upkeep import DEFAULT_UPKEEP, Upkeep
from turnstream_server.bus.endings import finish_run
from turnstream_server.bus.groups import Settlement, announce_due, grant_refill, settle_groups
from turnstream_server.bus.manifests import (
    StoredManifest,
    encode_for_store,
    read_manifests,
    write_manifest,
)
from turnstream_server.bus.release import groups_that_are_gone
from turnstream_server.failpoints import reach

logger = logging.getLogger(__name__)

GATHER_S: Final = 0.004
"""Pause after events, in which more of them come: each read costs as much as fifty events, so that
a thousand trajectories that are sealed one by one would otherwise cost 0.2 CPU seconds."""

PAGE_MANIFESTS: Final = 64
"""Plans of one reply when a history is replayed: a manifest may have a megabyte."""

_MAX_NAMED: Final = 8

Hook = Callable[[Manifest], Awaitable[None]]


async def no_hook(_: Manifest) -> None:
    """Do nothing between the check of a plan and its writing."""


class Leader:
    """One term of leading a run, from the replay of its history until it is fenced.

    Args:
        client: of the store.
        view: what this replica knows of the run.
        assembler: checks the payload of what is planned.
        epoch: fencing number of the term.
        revisions: of the config, as the term began.
        upkeep: when to take snapshots.
        before_write: awaited when a plan is checked and not yet written; for fault injection.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        view: RunView,
        assembler: Assembler,
        *,
        epoch: int,
        revisions: Revisions,
        upkeep: Upkeep = DEFAULT_UPKEEP,
        before_write: Hook = no_hook,
    ) -> None:
        self._client = client
        self._view = view
        self._assembler = assembler
        self._epoch = epoch
        self._in_force = ConfigInForce(client, view, epoch=epoch, known=revisions)
        self._upkeep = upkeep
        self._before_write = before_write
        self._fold = RunFold(self._config)
        self._selector = Selector(self._config)
        self._last_event_id = "0-0"
        self._listener = RunListener(client, view.run, after_step=0)
        self._letters = LetterBox(client, view.run, epoch=epoch)
        self._next_step = 1
        self._previous_hash = ""
        self._next_row_id = 0
        self._warned: set[str] = set()
        self._memory = PlannerMemory(client, view.run, assembler, epoch=epoch, upkeep=upkeep)

    @property
    def _config(self) -> BatchingConfig:
        return self._in_force.config

    async def lead(self) -> None:
        """Plan whatever can be planned, for ever.

        Raises:
            FencedError: another planner leads the run.
            StoreUnavailableError: the store cannot be reached.
        """
        await self._replay()
        await self._view.refresh()
        logger.info(
            "leading run %s from step %d on",
            self._view.run,
            self._next_step,
            extra={"epoch": self._epoch},
        )
        self._view.explain = self._explain
        self._view.undecided = lambda: [
            *(group.group_id for group in self._fold.waiting()),
            *self._fold.evaluating,
        ]
        try:
            while True:
                await self._plan_what_is_due()
                await self._finish()
                # A choice of groups is not part of a snapshot; it stands for a moment only.
                if self._selector.choice is None and self._memory.is_due(step=self._next_step - 1):
                    await self._memory.save(self._snapshot(), self._fold)
                await self._listen()
        finally:
            self._view.explain = None
            self._view.undecided = list

    async def _replay(self) -> None:
        """Fold the history in; each plan takes its groups where it was made."""
        await self._restore()
        planned = await self._read_planned()
        decisions = await self._pass_all(planned, through=self._listener.position)
        while events := await self._listener.read_events():
            for entry in events:
                decisions += self._apply(entry)
                decisions += await self._pass_all(planned, through=entry.event_id)
            self._memory.num_events += len(events)
            await asyncio.sleep(0)
        await self._carry_out(await self._still_known(decisions))

    async def _restore(self) -> None:
        """Go on from the snapshot, where there is one."""
        snapshot = await self._memory.read()
        if snapshot is None:
            return
        self._in_force.restore(snapshot.config_revision, snapshot.revised_at)
        self._fold = snapshot.restore_fold(self._config)
        self._selector = Selector(self._config)
        self._selector.versions = VersionSteps(snapshot.versions, lineage=snapshot.lineage)
        self._selector.pass_step(snapshot.step)
        self._last_event_id = snapshot.position
        self._listener.start_after(snapshot.position)
        self._listener.pass_step(snapshot.step)
        self._next_step = snapshot.step + 1
        self._previous_hash = snapshot.manifest_hash
        self._next_row_id = snapshot.next_row_id

    def _snapshot(self) -> PlannerSnapshot:
        return PlannerSnapshot(
            position=self._listener.position,
            step=self._next_step - 1,
            manifest_hash=self._previous_hash,
            next_row_id=self._next_row_id,
            fold=self._fold.snapshot(),
            versions=self._selector.versions.steps,
            lineage=self._selector.versions.lineage,
            config_revision=self._in_force.revision,
            revised_at=self._in_force.since,
        )

    async def _still_known(self, decisions: list[Decision]) -> list[Decision]:
        """Those that the ledger may not have been told of: a group that is gone was settled.

        A member may still be there: it was sealed when its group was decided, or later.
        """
        names = list({keys.encode_name(_group_of(each)): None for each in decisions})
        gone = await groups_that_are_gone(self._client, self._view.run, names)
        return [
            each
            for each in decisions
            if isinstance(each, MemberDropped) or keys.encode_name(_group_of(each)) not in gone
        ]

    async def _pass_all(self, planned: deque[StoredManifest], *, through: str) -> list[Decision]:
        """Take the groups of the plans that were made up to an event, and remove these plans."""
        decisions: list[Decision] = []
        last = event_position(through)
        while planned and event_position(planned[0].manifest.last_event_id) <= last:
            decisions += self._pass(planned.popleft().manifest)
            if not planned:
                planned += await self._read_planned()
        return decisions

    async def _read_planned(self) -> deque[StoredManifest]:
        """The next plans of those that exist, noting the last of them."""
        stored = await read_manifests(
            self._client, self._view.run, first_step=self._next_step, max_count=PAGE_MANIFESTS
        )
        for each in stored:
            self._note_written(each)
        return deque(stored)

    def _pass(self, manifest: Manifest) -> list[Decision]:
        wanted = {group.group_id for group in manifest.groups}
        left_over = self._fold.take(
            [group for group in self._fold.ready if group.group_id in wanted]
        )
        self._selector.pass_step(manifest.step)
        return left_over

    def _note_written(self, stored: StoredManifest) -> None:
        self._next_step = stored.manifest.step + 1
        self._previous_hash = stored.hash
        self._next_row_id = stored.manifest.end_row_id
        self._listener.pass_step(stored.manifest.step)

    async def _listen(self) -> None:
        """Wait for news and take it in."""
        news = await self._listener.wait(with_events=True)
        await self._take_in(news.events)
        if news.is_frontier_old:
            await self._view.refresh()
        elif len(news.events) < PAGE_EVENTS and not self._due_groups():
            await asyncio.sleep(GATHER_S)

    async def _take_in(self, events: Iterable[EventEntry]) -> None:
        decisions: list[Decision] = []
        for entry in events:
            decisions += self._apply(entry)
            self._memory.num_events += 1
        self._memory.forget(self._fold, position=self._listener.position)
        await self._carry_out(decisions)

    def _apply(self, entry: EventEntry) -> list[Decision]:
        """Fold an event in; gives what it decides. One that cannot be read is passed over."""
        self._last_event_id = entry.event_id
        event = self._letters.read(entry)
        if event is None:
            return []
        if isinstance(event, ConfigRevised):
            return self._take_revision(entry.event_id, event)
        decisions = self._fold.apply(entry.event_id, event)
        return [*decisions, *self._selector.apply(entry.event_id, event, self._fold)]

    def _take_revision(self, event_id: str, event: ConfigRevised) -> list[Decision]:
        if not self._in_force.take(event_id, event):
            return []
        self._selector.revise(self._config)
        return self._fold.revise(event_id, self._config)

    async def _carry_out(self, decisions: Iterable[Decision]) -> None:
        """Tell the ledger; all of it may have been told before, by the leader of another term."""
        standing = [each for each in decisions if self._fold.still_holds(each)]
        settled = [each for each in standing if not isinstance(each, RefillWanted)]
        for decision in settled:
            _log_settlement(decision)
        await self._settle(settled)
        for decision in standing:
            if isinstance(decision, RefillWanted):
                await self._grant(decision)

    async def _settle(self, settled: list[Settlement]) -> None:
        await self._letters.put_away()
        if settled:
            reach("settle.before")
        try:
            await settle_groups(self._client, self._view.run, settled, leader_epoch=self._epoch)
        except ConflictError as error:  # the rest of them was settled
            logger.warning("a group of run %s cannot be settled: %s", self._view.run, error)
        if settled:
            reach("settle.after")

    async def _grant(self, wanted: RefillWanted) -> None:
        run = self._view.run
        if await grant_refill(self._client, run, wanted, leader_epoch=self._epoch):
            logger.info("refill %d of group %s: %s", wanted.number, wanted.key.group_id, wanted.key)

    async def _plan_what_is_due(self) -> None:
        while groups := await self._next_groups():
            if self._config.chooses_by_event and self._selector.choice is None:
                await self._choose()
            elif not await self._plan(groups):
                await self._take_in(await self._listener.read_events())

    async def _finish(self) -> None:
        """Say that nothing more is planned, where that is so."""
        frontier = self._view.frontier
        while self._fold.is_finished and not frontier.is_finished and frontier.paused is None:
            await finish_run(
                self._client,
                self._view.run,
                step=self._next_step - 1,
                position=self._listener.position,
                leader_epoch=self._epoch,
            )
            await self._take_in(await self._listener.read_events())
            frontier = await self._view.refresh()

    async def _next_groups(self) -> tuple[ReadyGroup, ...]:
        """The groups of the next batch, by the config of its step."""
        while 0 < self._view.frontier.next_revision <= self._next_step:
            revision = await self._in_force.announce(step=self._next_step)
            while self._in_force.revision < revision:
                await self._take_in(await self._listener.read_events())
            await self._view.refresh()
        return self._due_groups()

    async def _choose(self) -> None:
        """Write the event at which the groups of the next batch are chosen, and come to it."""
        event_id = await announce_due(
            self._client, self._view.run, BatchDue(step=self._next_step), leader_epoch=self._epoch
        )
        while event_position(self._last_event_id) < event_position(event_id):
            await self._take_in(await self._listener.read_events())

    def _due_groups(self) -> tuple[ReadyGroup, ...]:
        """The groups of the next batch; none while it must wait."""
        is_paused = self._view.frontier.paused is not None
        if is_paused or self._next_step > self._last_allowed_step():
            return ()
        if self._selector.choice is not None:
            return self._selector.choice.groups
        num_groups = num_groups_to_plan(
            self._fold.num_ready, self._config, is_final=self._fold.is_final
        )
        return self._fold.ready[:num_groups] if num_groups else ()

    def _last_allowed_step(self) -> int:
        return self._view.frontier.stepped + 1 + self._config.max_planned_ahead

    async def _plan(self, groups: tuple[ReadyGroup, ...]) -> bool:
        """Plan, check and write the next batch; False where it must be planned anew.

        Some of its payload was damaged, or the step has got another config meanwhile, or the run
        was paused.
        """
        stored = await self._assembler.in_thread(lambda: self._make_plan(groups))
        manifest = stored.manifest
        batch = PlannedBatch(manifest=manifest, manifest_hash=stored.hash, config=self._config)
        reach("plan.before_check")
        try:
            await self._assembler.check(batch)
        except DamagedPayloadError as error:
            logger.warning("run %s: %s", self._view.run, error)
            await self._letters.set_aside(error.damages)
            return False
        self._prepare(batch)
        await self._before_write(manifest)
        reach("plan.before_write")
        if not await self._write(stored):
            return False
        reach("plan.after_write")
        self._note_written(stored)
        num_over_age = self._selector.num_over_age(groups, step=manifest.step)
        left_over = self._fold.take(groups)
        self._selector.pass_step(manifest.step)
        self._view.offer(batch)
        await self._carry_out(left_over)
        logger.info(
            "planned step %d of run %s",
            manifest.step,
            self._view.run,
            extra={
                "num_groups": len(groups),
                "num_over_age": num_over_age,
                "manifest_hash": stored.hash,
            },
        )
        self._warn_of(manifest)
        return True

    async def _write(self, stored: StoredManifest) -> bool:
        """Write a plan; False where the step has got another config, or the run a pause."""
        try:
            await write_manifest(self._client, self._view.run, stored, leader_epoch=self._epoch)
        except ConflictError:
            frontier = await self._view.refresh()
            is_revised = 0 < frontier.next_revision <= stored.manifest.step
            if is_revised or frontier.paused is not None:
                return False
            raise
        return True

    def _warn_of(self, manifest: Manifest) -> None:
        """Say what is odd about a batch: of each kind once, or a run would say nothing else."""
        for kind, sentence in plan_report(manifest, self._config).warnings.items():
            if kind not in self._warned:
                self._warned.add(kind)
                logger.warning(
                    "step %d of run %s: %s; the next batches are not reported",
                    manifest.step,
                    self._view.run,
                    sentence,
                )

    def _make_plan(self, groups: tuple[ReadyGroup, ...]) -> StoredManifest:
        choice = self._selector.choice
        manifest = plan_batch(
            groups,
            config=self._config,
            run=self._view.run,
            step=self._next_step,
            lineage=self._view.frontier.lineage,
            previous_hash=self._previous_hash,
            first_row_id=self._next_row_id,
            config_revision=self._in_force.revision,
            revised_at=self._in_force.since,
            chosen_at="" if choice is None else choice.chosen_at,
            masked_versions=() if choice is None else choice.masked_versions,
        )
        return encode_for_store(manifest)

    def _prepare(self, batch: PlannedBatch) -> None:
        """Begin to encode what most trainers of one rank ask this replica for next."""
        frontier = self._view.frontier
        if frontier.session_epoch and frontier.dp_world_size == 1:
            self._assembler.prepare(batch, mini_batch=0, dp_rank=0, dp_world_size=1)

    def _explain(self, step: int) -> str:
        """Why a step is not planned yet."""
        if step > self._next_step:
            return f"step {step}: step {self._next_step} is planned before it"
        if step > self._last_allowed_step():
            stepped = self._view.frontier.stepped
            return f"step {step} is planned when step {stepped + 1} is stepped"
        reason = (
            f"step {step}: {self._fold.num_ready} of {self._config.batch_groups} groups complete, "
            f"{self._fold.num_open_groups} open"
        )
        oldest = next(self._fold.waiting(), None)
        return f"{reason}; {_describe(oldest)}" if oldest else reason


def _group_of(decision: Decision) -> str:
    match decision:
        case MemberDropped(key=key) | RefillWanted(key=key):
            return key.group_id
        case (
            GroupDropped(group_id=group_id)
            | GroupCut(group_id=group_id)
            | GroupEvaluated(group_id=group_id)
        ):
            return group_id


def _log_settlement(settled: Settlement) -> None:
    match settled:
        case MemberDropped(key=key, state=state, reason=reason):
            logger.debug("trajectory %s is %s: %s", key, state, reason)
        case GroupCut(group_id=group_id, reason=reason):
            logger.debug("group %s is cut: %s", group_id, reason)
        case GroupDropped(group_id=group_id, state=state, reason=reason):
            logger.info("group %s is %s: %s", group_id, state, reason)
        case GroupEvaluated(group_id=group_id, keys=counted):
            logger.info("group %s is evaluated, %d trajectories of it", group_id, len(counted))


def _describe(group: WaitingGroup) -> str:
    """A group in the words of whoever waits for it.

    "group g7, open since 2026-03-01 12:00:00 UTC, has 2 of 4 members; sample 1, 3 may still come"
    """
    opened_s = int(group.opened_by.partition("-")[0]) / 1000
    since = datetime.fromtimestamp(opened_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    has = f"has {group.num_members} of {group.num_needed} members"
    parts = [f"group {group.group_id}, open since {since}, {has}"]
    awaited = {key.sample for key in group.awaiting}
    hanging = [sample for sample in group.samples if sample not in awaited]
    if hanging:
        parts.append(f"sample {_listed(hanging)} may still come")
    if awaited:
        parts.append(f"the reward of sample {_listed(sorted(awaited))} was not posted")
    if group.num_refills:
        parts.append(f"{group.num_refills} refills were asked for")
    return "; ".join(parts)


def _listed(samples: Sequence[int]) -> str:
    named = ", ".join(map(str, samples[:_MAX_NAMED]))
    return f"{named} and {len(samples) - _MAX_NAMED} more" if samples[_MAX_NAMED:] else named
