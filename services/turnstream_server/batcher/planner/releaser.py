"""Delete the payload and the ledger entries of finished steps and trajectories, for one leader.

The work is done in rounds of bounded size. If finished steps are left, the next round follows at
once, else after a short pause: so release keeps up with planning. Only the search for untrained
trajectories is paced by its own duration, because it reads the whole ledger.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Sequence
from typing import Final

from turnstream.errors import (
    ConflictError,
    FencedError,
    RecordError,
    RunNotFoundError,
    UnavailableError,
)
from turnstream.records.compact import compact_batch, encode_batch, encode_ends
from turnstream.store.client import keys
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.admin.dead_letters import discard_oldest
from turnstream_server.ledger.core.frontier import read_frontier_async
from turnstream_server.ledger.leadership.leader_fields import note_trouble
from turnstream_server.ledger.leadership.writes import Term
from turnstream_server.ledger.planning.manifests import StoredManifest, read_manifests
from turnstream_server.ledger.release.release import (
    COMPACT_SLICE,
    ReleaseState,
    advance_watermark,
    compact_batches,
    compact_ended,
    find_ended,
    finish_batches,
    finished_groups,
    read_release_state,
    release_payload,
)

logger = logging.getLogger(__name__)

SHORTEST_PAUSE_S: Final = 0.1
"""Pause between two rounds, in which commits gather: an empty round costs as much as the release of
ten trajectories. It must not grow with the last round, or the backlog has no bound."""

LONGEST_PAUSE_S: Final = 2.0
"""Longest pause after rounds without work; a batch that is planned or stepped ends it."""

SEARCH_REST: Final = 9
"""A search for untrained trajectories is followed by a rest of so many times its duration. It is
not where more than one of so many entries is untrained, so that the backlog stays bounded."""

ROUND_SLICE: Final = 1_000
"""Trajectories of the steps that one round releases, or one larger step. Folding must not delay the
release of payload, whose bytes are counted."""

PAGE: Final = 500
"""Ended trajectories whose payload is deleted before they are noted."""


class Releaser:
    """Deletes finished steps and trajectories of one run, for one leadership term.

    Attributes:
        done_at_s: start of the newest round, by the event loop's clock, if that round had no work
            and no trouble; else minus infinity.
    """

    def __init__(self, term: Term, view: RunView, *, owner: str, upkeep: Upkeep) -> None:
        self.done_at_s = float("-inf")
        self._term = term
        self._client = term.client
        self._run = term.run
        self._view = view
        self._owner = owner
        self._upkeep = upkeep
        self._archived = None if upkeep.archive is None else 0
        self._lineage = ""
        self._noted = ""
        self._payload_through = 0
        self._steps_at_once = 1
        self._has_backlog = False
        self._search_from_s = 0.0
        self._ended: dict[str, str] = {}
        """Ended trajectories without payload that are still in the ledger, with their entries."""

    async def run(self) -> None:
        """Run rounds until cancelled."""
        pause_s = SHORTEST_PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            has_worked = await self.run_round()
            is_done = not has_worked and not self._noted
            self.done_at_s = started_s if is_done else float("-inf")
            if has_worked and self._has_backlog:
                await asyncio.sleep(0)
                continue
            await asyncio.sleep(SHORTEST_PAUSE_S)
            pause_s = SHORTEST_PAUSE_S if has_worked else min(LONGEST_PAUSE_S, 2 * pause_s)
            if await self._view.wait_for_change(pause_s - SHORTEST_PAUSE_S):
                pause_s = SHORTEST_PAUSE_S

    async def run_round(self) -> bool:
        """Run one round, and record its errors in the run; return whether it had work."""
        trouble, has_worked = "", False
        jobs = (self._release_batches, self._release_ended, self._discard_dead_letters)
        try:
            trouble = await self._archive()
            state = await read_release_state(self._client, self._run)
            if state.released < state.checkpoint:
                failpoint("advance_watermark.before")
                through = await advance_watermark(self._term, at_most=self._archived)
                if through > state.released:
                    state = await read_release_state(self._client, self._run)
            for job in jobs:
                has_worked |= await job(state)
        except (FencedError, RunNotFoundError, UnavailableError):
            raise
        except Exception as error:  # planning must not stop because release fails
            logger.exception("release in run %s failed", self._run)
            trouble = trouble or str(error) or repr(error)
        await self._note(trouble)
        return has_worked

    async def _discard_dead_letters(self, state: ReleaseState) -> bool:
        if state.dead_bytes == 0:
            return False
        _, config = await self._view.newest_config()
        if state.dead_bytes <= config.max_dead_bytes:
            return False
        limit = config.max_dead_bytes
        num_discarded = await discard_oldest(self._client, self._run, max_bytes=limit)
        if num_discarded:
            logger.warning(
                "run %s: %d dead letters above max_dead_bytes=%d are discarded",
                self._run,
                num_discarded,
                limit,
            )
        return num_discarded > 0

    async def _archive(self) -> str:
        """Archive committed steps; return why the next one is not archived, and not released."""
        archive = self._upkeep.archive
        if archive is None or self._archived is None:
            return ""
        frontier = await read_frontier_async(self._client, self._run)
        if frontier.lineage != self._lineage:  # after a rollback, steps may be planned again
            self._lineage, self._archived = frontier.lineage, 0
        self._archived = max(self._archived, frontier.released)
        for step in range(self._archived + 1, frontier.committed + 1):
            try:
                await asyncio.to_thread(archive, self._run, step)
            except (RecordError, OSError) as error:
                return f"step {step} is not archived: {error}"
            self._archived = step
        return ""

    async def _note(self, trouble: str) -> None:
        """Record why steps are not released, for `turnstream why`; empty if they are."""
        if trouble == self._noted:
            return
        if trouble:
            logger.warning("run %s: %s", self._run, trouble)
        await note_trouble(self._term, "release_trouble", trouble, owner=self._owner)
        self._noted = trouble

    async def _release_batches(self, state: ReleaseState) -> bool:
        """Delete the payload of some released steps, then fold some that the snapshot includes."""
        released = max(state.folded, self._payload_through)
        has_worked = released < state.released
        if has_worked:
            plans = await self._plans(released + 1, last=state.released)
            groups = [group for each in plans for group in each.manifest.groups]
            members = [member.key for group in groups for member in group.trajectories]
            await self._release_payload([*map(keys.trajectory_id, members)])
            released = self._payload_through = plans[-1].manifest.step
        folded, fold_through = state.folded, min(released, state.released, state.snapshot_step)
        if folded < fold_through:
            plans = await self._plans(folded + 1, last=fold_through)
            await self._compact_batches(plans)
            folded = plans[-1].manifest.step
        self._has_backlog = released < state.released or folded < fold_through
        return has_worked or state.folded < folded

    async def _release_payload(
        self, trajectory_ids: list[str], *, abandoned: Container[str] = ()
    ) -> None:
        _, config = await self._view.newest_config()
        await release_payload(
            self._term, trajectory_ids, lease_s=config.lease_s, abandoned=abandoned
        )

    async def _compact_batches(self, plans: Sequence[StoredManifest]) -> None:
        records = await asyncio.to_thread(
            lambda: {
                each.manifest.step: encode_batch(
                    compact_batch(each.manifest, manifest_hash=each.hash)
                )
                for each in plans
            }
        )
        manifests = [each.manifest for each in plans]
        failpoint("compact_batch.before")
        await compact_batches(self._term, manifests)
        failpoint("finish_batch.before")
        await finish_batches(self._term, records)
        logger.info("released steps %d to %d of run %s", min(records), max(records), self._run)

    async def _plans(self, first: int, *, last: int) -> list[StoredManifest]:
        """Return the plans of one step or more from `first` on, about ROUND_SLICE trajectories."""
        max_count = min(self._steps_at_once, last - first + 1)
        found = await read_manifests(self._client, self._run, first_step=first, max_count=max_count)
        if found and found[0].manifest.step == first:
            num_trajectories = max(1, sum(each.manifest.num_trajectories for each in found))
            self._steps_at_once = 1 + ROUND_SLICE * len(found) // num_trajectories
            return found
        if first <= (await read_release_state(self._client, self._run)).folded:
            raise FencedError(f"another planner has folded step {first} of run {self._run!r}")
        raise ConflictError(f"step {first} of run {self._run!r} has no plan")

    async def _release_ended(self, state: ReleaseState) -> bool:
        """Delete the payload of untrained trajectories, and fold their entries, many together."""
        loop = asyncio.get_running_loop()
        least = min(self._upkeep.compact_ended, COMPACT_SLICE)
        num_new = state.num_ended - state.num_ended_folded - len(self._ended)
        if num_new <= 0 and len(self._ended) < least:
            return False
        is_worth_it = 0 < state.num_entries <= SEARCH_REST * num_new
        if loop.time() < self._search_from_s and not is_worth_it:
            return True
        started_s = loop.time()
        found = await find_ended(self._client, self._run) if num_new > 0 else {}
        new = {name: entry for name, entry in found.items() if name not in self._ended}
        foldable = await self._foldable([*self._ended, *new])
        self._search_from_s = loop.time() + SEARCH_REST * (loop.time() - started_s)
        await self._release_new(new)
        return await self._fold_slices(foldable, state, least=least) or num_new > 0

    async def _release_new(self, new: dict[str, str]) -> None:
        names = list(new)
        for start in range(0, len(names), PAGE):
            some = {name: new[name] for name in names[start : start + PAGE]}
            abandoned = {name for name in some if some[name].startswith("abandoned:")}
            await self._release_payload([*some], abandoned=abandoned)
            self._ended |= some

    async def _foldable(self, trajectory_ids: Sequence[str]) -> list[str]:
        """Return the trajectories of finished groups in order: in others, names may be opened."""
        by_group = await asyncio.to_thread(_by_group, trajectory_ids)
        finished = await finished_groups(self._client, self._run, [*by_group])
        return [each for group in by_group if group in finished for each in by_group[group]]

    async def _fold_slices(
        self, foldable: Sequence[str], state: ReleaseState, *, least: int
    ) -> bool:
        """Replace entries by compact records of at least `least`; return whether any was made."""
        starts = range(0, len(foldable) - least + 1, COMPACT_SLICE)
        for number, start in enumerate(starts, start=state.num_records + 1):
            some = foldable[start : start + COMPACT_SLICE]
            ended = {keys.parse_trajectory_id(each): self._ended[each] for each in some}
            record = await asyncio.to_thread(encode_ends, ended)
            failpoint("compact_ended.before")
            try:
                await compact_ended(self._term, some, number=number, record=record)
            except ConflictError:  # a plan was withdrawn since
                if not {*some} <= {*await self._foldable(some)}:
                    return True  # one of these groups may change again
                await compact_ended(self._term, some, number=number, record=record)
            for each in some:
                del self._ended[each]
        return len(starts) > 0


def _by_group(trajectory_ids: Sequence[str]) -> dict[str, list[str]]:
    """Return trajectories by group name, in the order of their names.

    >>> _by_group(["g2/0/0", "g1/1/0", "g1/0/0"])
    {'g1': ['g1/0/0', 'g1/1/0'], 'g2': ['g2/0/0']}
    """
    groups: dict[str, list[str]] = {}
    for each in sorted(trajectory_ids):
        groups.setdefault(each.partition("/")[0], []).append(each)
    return groups
