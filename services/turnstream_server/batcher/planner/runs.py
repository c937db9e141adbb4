"""The view of a run in one replica: refreshed by the run's planner, awaited by calls."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import redis.asyncio
from redis.exceptions import RedisError

from turnstream.batching.config import BatchingConfig
from turnstream.errors import (
    BatcherUnavailableError,
    EndOfRunError,
    NotReadyError,
    RunNotFoundError,
)
from turnstream.records.configs import decode_config
from turnstream.store.client import keys
from turnstream.store.client.replies import translate
from turnstream.store.run.configs import read_config_async
from turnstream.types import TrajectoryState
from turnstream.types.names import RunId
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.reason_cache import ReadReasons, no_reasons
from turnstream_server.bus.core.frontier import Frontier, not_retained, read_frontier_async
from turnstream_server.bus.planning.manifests import read_manifest
from turnstream_server.bus.queries.ledger import read_ledger_async

_MANIFESTS_KEPT: Final = 8


class RunView:
    """A run as this replica sees it.

    Args:
        client: client of the store.
        run: id of the run.
        on_stepped: called with the newest stepped batch whenever it may have moved.
        read_reasons: returns why a batch is missing, for calls that have waited for it.

    Attributes:
        frontier: the last read frontier.
        explain: returns why a step is missing, if a planner leads here; else None.
        trouble: last error of planning; empty after a success.
        undecided: groups that the local planner has not decided, the oldest first, then evaluations
            that have not ended.
        led_by_revision: config revision of the local planner; 0 before the first.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        run: str,
        *,
        frontier: Frontier,
        on_stepped: Callable[[int], None],
        read_reasons: ReadReasons = no_reasons,
    ) -> None:
        self.run = RunId(run)
        self.frontier = frontier
        self.explain: Callable[[int], str] | None = None
        self.trouble = ""
        self.led_by_revision = 0
        self.undecided: Callable[[], list[str]] = list
        self._client = client
        self._on_stepped = on_stepped
        self._read_reasons = read_reasons
        self._changed = asyncio.Event()
        self._num_reads = 0
        self._newest_read = 0
        self._num_offers = 0
        self._batches: OrderedDict[int, PlannedBatch] = OrderedDict()
        self._configs: dict[int, BatchingConfig] = {}
        self._num_forgotten = 0
        self._is_closed = False
        self._is_gone = False

    async def refresh(self) -> Frontier:
        """Return the frontier, read after this call began; wake all waiting calls.

        Replies may overtake one another, and a frontier from before a plan was written must not
        replace a newer one.
        """
        while True:
            self._num_reads += 1
            read, num_offers = self._num_reads, self._num_offers
            frontier = await read_frontier_async(self._client, self.run)
            if num_offers != self._num_offers:
                continue
            if read > self._newest_read:
                self._newest_read = read
                self._set_frontier(frontier)
            return self.frontier

    def offer(self, batch: PlannedBatch) -> None:
        """A batch was planned here: no need to read it back."""
        self._num_offers += 1
        self.trouble = ""
        self._keep(batch)
        self._set_frontier(dataclasses.replace(self.frontier, planned=batch.manifest.step))

    async def wait_for_change(self, wait_s: float) -> bool:
        """Wait until the frontier is read again; False after `wait_s` without it.

        Once this replica stops, or the run is gone, nothing changes any more.
        """
        if self._is_closed or self._is_gone:
            await asyncio.sleep(max(0.0, wait_s))
            return False
        changed = self._changed
        try:
            async with asyncio.timeout(max(0.0, wait_s)):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    def forget(self) -> None:
        """The store may have lost what was read of it: numbers may name something else since."""
        self._batches.clear()
        self._configs.clear()
        self._num_forgotten += 1

    def close(self) -> None:
        """Refuse all waiting calls: this replica stops."""
        self._is_closed = True
        self._changed.set()

    def lose(self) -> None:
        """Refuse all waiting calls, and drop the caches: the run was deleted."""
        self._is_gone = True
        self._changed.set()
        self._on_stepped(self.frontier.planned)

    async def wait_for_batch(
        self, step: int, *, check: Callable[[Frontier], None], wait_s: float
    ) -> PlannedBatch:
        """Return the batch of a step, once it is planned.

        Args:
            step: number of the batch.
            check: raises if the caller may not have it; repeated after every change.
            wait_s: longest wait.

        Raises:
            BatcherUnavailableError: this replica stops.
            NotReadyError: it was not planned within `wait_s`, with the reason; or the store was
                restarted and may have lost acknowledgements of the trainer.
            EndOfRunError: there will never be one.
        """
        deadline_s = asyncio.get_running_loop().time() + wait_s
        num_forgotten = self._num_forgotten
        await self.refresh()  # an old session must not be served from what was true a moment ago
        while True:
            if self._is_closed:
                raise BatcherUnavailableError("this replica stops")
            if self._is_gone:
                raise RunNotFoundError(f"run {self.run!r} was deleted")
            changed = self._changed
            check(self.frontier)
            if step <= self.frontier.planned:
                return await self.batch(step)
            if self._is_over():
                raise EndOfRunError(f"run {self.run!r} ended with step {self.frontier.planned}")
            if self._num_forgotten > num_forgotten:
                raise NotReadyError(f"step {step}: the store was restarted")
            try:
                async with asyncio.timeout_at(deadline_s):
                    await changed.wait()
            except TimeoutError:
                why, reasons = await self._why_not(step), await self._read_reasons(self.run)
                raise NotReadyError(why, reasons) from None

    async def batch(self, step: int) -> PlannedBatch:
        """Return the plan of a planned step.

        Cached plans count only while the store has them: a power cut may have taken a plan away,
        and another one may have its number.

        Raises:
            ReleasedError: it is no longer retained.
            RecordError: the stored plan is damaged, or of a newer release.
        """
        batch = self._batches.get(step)
        entry = await self._call("HGET", keys.run_keys(self.run).batches, step)
        if batch is None or not (entry or b"").endswith(f":{batch.manifest_hash}".encode()):
            stored = await read_manifest(self._client, self.run, step)
            if stored is None and step <= (await self.refresh()).released:
                raise not_retained(step, self.frontier)
            if stored is None:
                raise NotReadyError(f"step {step}: its plan is not in the store")
            config = await self.config(stored.manifest.config_revision)
            batch = PlannedBatch(manifest=stored.manifest, manifest_hash=stored.hash, config=config)
            self._keep(batch)
        return batch

    async def config(self, revision: int) -> BatchingConfig:
        """The configuration of the run in one of its revisions.

        Raises:
            NotReadyError: the store has no such revision: it may have lost it in a power cut.
        """
        config = self._configs.get(revision)
        if config is None:
            text = await self._call("HGET", keys.run_keys(self.run).config, revision)
            if text is None:
                raise NotReadyError(f"run {self.run!r}: config revision {revision} is not there")
            config = self._configs[revision] = decode_config(text, run=self.run)
        return config

    async def newest_config(self) -> tuple[int, BatchingConfig]:
        """The configuration in force, which admission, leases and deadlines go by; its revision."""
        return await read_config_async(self._client, self.run)

    def _keep(self, batch: PlannedBatch) -> None:
        self._batches[batch.manifest.step] = batch
        while len(self._batches) > _MANIFESTS_KEPT:
            self._batches.popitem(last=False)

    def _set_frontier(self, frontier: Frontier) -> None:
        self.frontier = frontier
        self._on_stepped(frontier.stepped)
        self._changed.set()
        self._changed = asyncio.Event()

    def _is_over(self) -> bool:
        """Whether nothing more will be planned, and all batches are stepped."""
        return self.frontier.is_finished and self.frontier.stepped >= self.frontier.planned

    async def _why_not(self, step: int) -> str:
        reason = await self._missing(step)
        return f"{reason}; planning failed: {self.trouble}" if self.trouble else reason

    async def _missing(self, step: int) -> str:
        frontier = self.frontier
        if frontier.paused is not None:
            return f"step {step}: {frontier.pause}, and no batch is planned until it is resumed"
        if frontier.is_closed and frontier.stepped < frontier.planned < step:
            return f"step {step}: the run is closed; step {frontier.planned} is not stepped yet"
        if self.explain is not None:
            return self.explain(step)
        ledger = await read_ledger_async(self._client, self.run)
        return (
            f"step {step}: {frontier.planned} steps are planned, {frontier.stepped} are stepped; "
            f"{ledger.by_state[TrajectoryState.OPEN]} trajectories are open, "
            f"{ledger.by_state[TrajectoryState.SEALED]} are sealed"
        )

    async def _call(self, *words: str | int) -> Any:
        try:
            return await self._client.execute_command(*words)
        except (RedisError, OSError) as error:
            raise translate(error) from error
