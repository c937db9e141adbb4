"""The task of a leader that lets go of what is over, a little at a time, beside the planning."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Container
from typing import Any, Final

import redis.asyncio

from turnstream.errors import (
    ConflictError,
    FencedError,
    RecordError,
    RunNotFoundError,
    UnavailableError,
)
from turnstream.records.compact import compact_batch, compact_ends, encode_batch, encode_ends
from turnstream.store import keys
from turnstream_server.batcher.runs import RunView
from turnstream_server.batcher.upkeep import Upkeep
from turnstream_server.bus.cold import move_to_file, read_hot_records, write_ledger_file
from turnstream_server.bus.discards import discard_oldest
from turnstream_server.bus.frontier import read_frontier_async
from turnstream_server.bus.leadership import note_trouble
from turnstream_server.bus.manifests import StoredManifest, read_manifest
from turnstream_server.bus.release import (
    FOLD_SLICE,
    ReleaseState,
    find_ended,
    finish_batch,
    fold_batch,
    fold_ended,
    give_back,
    groups_that_are_over,
    raise_floor,
    read_release_state,
    remove_payload,
)

logger = logging.getLogger(__name__)

SHORTEST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
"""Between rounds that find nothing; a batch that is planned or stepped ends it."""

REST: Final = 9
"""Pauses are so many times as long as the work before them: planning comes first."""

PAGE: Final = 500
"""Entries of the ledger that one call looks at."""


class Releaser:
    """Releases what is over in one run, for one term of its leader.

    Args:
        client: of the store.
        view: what this replica knows of the run.
        owner: the leader, by name.
        epoch: fencing number of the term.
        upkeep: when to fold.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        view: RunView,
        *,
        owner: str,
        epoch: int,
        upkeep: Upkeep,
    ) -> None:
        self._client = client
        self._view = view
        self._run = view.run
        self._owner = owner
        self._epoch = epoch
        self._upkeep = upkeep
        self._archived = 0
        self._trouble = ""
        self._file_trouble = ""
        self._noted = ""
        self._payload_through = 0
        self._ended: dict[str, str] = {}
        """Ended trajectories without payload that are still in the ledger."""

    async def run(self) -> None:
        """Go on until cancelled.

        Raises:
            FencedError: another planner leads the run.
            RunNotFoundError: the run is gone.
            StoreUnavailableError: the store cannot be reached.
        """
        loop = asyncio.get_running_loop()
        pause_s = SHORTEST_PAUSE_S
        while True:
            started_s = loop.time()
            has_worked = False
            try:
                has_worked = await self.release_what_is_over()
            except (FencedError, RunNotFoundError, UnavailableError):
                raise
            except Exception:  # planning must not stop because something cannot be released
                logger.exception("release in run %s failed", self._run)
            least_s = max(SHORTEST_PAUSE_S, REST * (loop.time() - started_s))
            pause_s = least_s if has_worked else min(LONGEST_PAUSE_S, max(least_s, 2 * pause_s))
            await asyncio.sleep(least_s)
            if await self._view.wait_for_change(pause_s - least_s):
                pause_s = SHORTEST_PAUSE_S

    async def release_what_is_over(self) -> bool:
        """One round; whether it found anything to do.

        Raises:
            FencedError: another planner leads the run.
            StoreUnavailableError: the store cannot be reached.
        """
        await self._upkeep.before("raise_floor")
        floor = await raise_floor(
            self._client, self._run, leader_epoch=self._epoch, at_most=await self._archive()
        )
        state = await read_release_state(self._client, self._run)
        has_batches = await self._release_batches(state, floor=floor)
        has_ended = await self._release_ended(state)
        has_cooled = await self._move_to_file(state)
        await self._note_trouble()
        return await self._discard_letters(state) or has_batches or has_ended or has_cooled

    async def _discard_letters(self, state: ReleaseState) -> bool:
        """The oldest dead letters, where they keep more than the run lets them."""
        _, config = await self._view.newest_config()
        if state.dead_bytes <= config.max_dead_bytes:
            return False
        await self._upkeep.before("discard_letters")
        num_discarded = await discard_oldest(
            self._client, self._run, max_bytes=config.max_dead_bytes
        )
        if num_discarded:
            logger.warning("%d dead letters of run %s had no room", num_discarded, self._run)
        return num_discarded > 0

    async def _archive(self) -> int | None:
        """Archive what was committed; the newest step that may be released, None for any."""
        archive = self._upkeep.archive
        if archive is None:
            return None
        frontier = await read_frontier_async(self._client, self._run)
        self._archived = max(self._archived, frontier.released)
        trouble = ""
        for step in range(self._archived + 1, frontier.committed + 1):
            try:
                await asyncio.to_thread(archive, self._run, step)
            except (RecordError, OSError) as error:
                # Nothing is released until the folder can be written again, or someone decides.
                trouble = f"step {step} is not archived: {error}"
                if trouble != self._trouble:
                    logger.warning("run %s: %s", self._run, trouble)
                break
            self._archived = step
        self._trouble = trouble
        return self._archived

    async def _note_trouble(self) -> None:
        """Tell `turnstream why` what is not released, and when it is again."""
        trouble = self._trouble or self._file_trouble
        if trouble != self._noted:
            await note_trouble(
                self._client, self._run, "release_trouble", trouble, owner=self._owner
            )
            self._noted = trouble

    async def _move_to_file(self, state: ReleaseState) -> bool:
        """Compact records of the oldest batches leave the store, as many as a file takes."""
        place = self._upkeep.ledger_folder
        steps = place.next_steps(cold=state.cold, folded=state.folded) if place else range(0)
        if place is None or not steps:
            return False
        records = await read_hot_records(self._client, self._run, steps)
        if records is None:  # of a fork that is not done
            return False
        await self._upkeep.before("write_ledger_file")
        try:
            name = await asyncio.to_thread(
                write_ledger_file, place.folder, self._run, steps, records
            )
        except OSError as error:
            trouble = f"the ledger stays in the store: {error}"
            if trouble != self._file_trouble:
                logger.warning("run %s: %s", self._run, trouble)
            self._file_trouble = trouble
            return False
        self._file_trouble = ""
        await self._upkeep.before("move_to_file")
        epoch = self._epoch
        await move_to_file(self._client, self._run, steps, name=name, leader_epoch=epoch)
        logger.info("steps %d to %d of run %s are in %s", steps[0], steps[-1], self._run, name)
        return True

    async def _release_batches(self, state: ReleaseState, *, floor: int) -> bool:
        first = max(state.folded, self._payload_through) + 1
        for step in range(first, floor + 1):
            stored = await self._plan(step)
            members = [each.key for group in stored.manifest.groups for each in group.trajectories]
            await self._release_payload([*map(keys.trajectory_id, members)])
            self._payload_through = step
        last = min(floor, state.snapshot_step)
        for step in range(state.folded + 1, last + 1):
            await self._fold_batch(await self._plan(step))
        return first <= floor or state.folded < last

    async def _release_payload(
        self, trajectory_ids: list[str], *, given_up: Container[str] = ()
    ) -> None:
        _, config = await self._view.newest_config()
        await self._upkeep.before("release_payload")
        await remove_payload(
            self._client, self._run, trajectory_ids, lease_s=config.lease_s, given_up=given_up
        )
        await self._upkeep.before("give_back")
        await give_back(self._client, self._run, trajectory_ids)

    async def _fold_batch(self, stored: StoredManifest) -> None:
        manifest = stored.manifest
        record = await asyncio.to_thread(
            lambda: encode_batch(compact_batch(manifest, manifest_hash=stored.hash))
        )
        await self._upkeep.before("fold_batch")
        await fold_batch(self._client, self._run, manifest, leader_epoch=self._epoch)
        await self._upkeep.before("finish_batch")
        await finish_batch(
            self._client, self._run, step=manifest.step, record=record, leader_epoch=self._epoch
        )
        logger.info(
            "released step %d of run %s",
            manifest.step,
            self._run,
            extra={"num_trajectories": manifest.num_trajectories, "num_bytes": len(record)},
        )

    async def _plan(self, step: int) -> StoredManifest:
        stored = await read_manifest(self._client, self._run, step)
        if stored is None and step <= (await read_release_state(self._client, self._run)).folded:
            raise FencedError(f"another planner has folded step {step} of run {self._run!r}")
        if stored is None:
            raise ConflictError(f"step {step} of run {self._run!r} is not folded, and has no plan")
        return stored

    async def _release_ended(self, state: ReleaseState) -> bool:
        """What ended untrained: the payload at once, the entries many together."""
        has_more = state.num_ended - state.num_ended_folded > len(self._ended)
        if has_more:
            await self._find_ended()
        number = state.num_records
        least = min(self._upkeep.fold_ended, FOLD_SLICE)
        while len(self._ended) >= least and len(some := await self._foldable()) >= least:
            number += 1
            try:
                await self._fold_ended(some, number=number)
            except ConflictError:
                if await self._foldable() == some:
                    raise
                return True  # a plan was withdrawn meanwhile: a group of these may change again
        return has_more or number > state.num_records

    async def _find_ended(self) -> None:
        cursor = "0"
        while True:
            cursor, found = await find_ended(
                self._client, self._run, cursor=cursor, num_entries=PAGE
            )
            new = [each for each in found if each not in self._ended]
            if new:
                given_up = {each for each in new if found[each].startswith("abandoned:")}
                await self._release_payload(new, given_up=given_up)
            self._ended |= found
            if cursor == "0":
                return

    async def _foldable(self) -> list[str]:
        """Ended trajectories whose groups can get no member any more, ordered, one slice of them.

        An entry of a group that is open keeps its name from being opened once more.
        """
        groups = sorted({each.partition("/")[0] for each in self._ended})
        over = await groups_that_are_over(self._client, self._run, groups)
        ended = [each for each in self._ended if each.partition("/")[0] in over]
        return sorted(ended, key=_natural)[:FOLD_SLICE]

    async def _fold_ended(self, trajectory_ids: list[str], *, number: int) -> None:
        ended = {keys.parse_trajectory_id(each): self._ended[each] for each in trajectory_ids}
        record = await asyncio.to_thread(lambda: encode_ends(compact_ends(ended)))
        await self._upkeep.before("fold_ended")
        await fold_ended(
            self._client,
            self._run,
            trajectory_ids,
            number=number,
            record=record,
            leader_epoch=self._epoch,
        )
        for each in trajectory_ids:
            del self._ended[each]


def _natural(trajectory_id: str) -> list[Any]:
    """Orders names by the numbers in them, so that they count up.

    >>> sorted(["g10/0/0", "g9/0/0", "g9/0/1"], key=_natural)
    ['g9/0/0', 'g9/0/1', 'g10/0/0']
    """
    parts = re.split(r"([0-9]+)", trajectory_id)  # texts and numbers by turns
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]
