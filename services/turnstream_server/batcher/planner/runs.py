"""The view of a run in one replica: refreshed by the run's planner, awaited by calls."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import redis.asyncio

from turnstream.batching.config import BatchingConfig
from turnstream.batching.planning.plan_batch import event_order
from turnstream.errors import (
    BatcherUnavailableError,
    EndOfRunError,
    NotReadyError,
    RunNotFoundError,
    WaitReason,
)
from turnstream.records.configs import decode_config
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.run.configs import read_config_async
from turnstream.types import Event, SealedTrajectory, TrajectoryAbandoned, TrajectoryDied
from turnstream.types.names import RunId
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.ledger.core.frontier import Frontier, not_retained, read_frontier_async
from turnstream_server.ledger.planning.manifests import read_manifest

logger = logging.getLogger(__name__)

_MANIFESTS_KEPT: Final = 8

_OUTCOMES: Final[dict[type[object], str]] = {
    SealedTrajectory: "sealed",
    TrajectoryAbandoned: "abandoned",
    TrajectoryDied: "died",
}


class Ingested:
    """Counts of one run in one process; each event counts once, in any number of terms."""

    def __init__(self, run: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self.num_turns = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self._run = run
        self._through: tuple[int, ...] | None = None

    def begin(self, *, epoch: int) -> None:
        """Begin a term with this epoch; earlier leaders have counted what was written before."""
        if self._through is None:
            self._through = (0, 0) if epoch == 1 else (int(time.time() * 1000), 0)

    def count(self, event_id: str, event: Event) -> None:
        """Count an event that ends a trajectory."""
        outcome = _OUTCOMES.get(type(event))
        if outcome is None or self._through is None:
            return
        order = event_order(event_id)
        if order <= self._through:
            return
        self._through = order
        self.outcomes[outcome] += 1
        if isinstance(event, SealedTrajectory):
            self.num_turns += len(event.turns)
            self.num_tokens += sum([turn.num_tokens for turn in event.turns])
            self.num_bytes += event.num_payload_bytes
        if logger.isEnabledFor(logging.DEBUG):
            assert isinstance(event, SealedTrajectory | TrajectoryAbandoned | TrajectoryDied)
            trajectory = event.key.trajectory_id
            logger.debug(outcome, extra={"run": self._run, "trajectory": trajectory})


async def _no_reasons(_: str) -> list[WaitReason]:
    return []


class RunView:
    """A run as this replica sees it.

    Args:
        on_stepped: called with the newest stepped batch whenever it may have moved.
        read_reasons: returns why a run waits, for calls that have waited for a batch.

    Attributes:
        frontier: the last read frontier.
        ingested: counts of the trajectories that were read here.
        num_ready: decided groups in no batch; None if another replica plans the run.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        run: str,
        *,
        frontier: Frontier,
        on_stepped: Callable[[int], None],
        read_reasons: Callable[[str], Awaitable[list[WaitReason]]] = _no_reasons,
    ) -> None:
        self.run = RunId(run)
        self.frontier = frontier
        self.ingested = Ingested(self.run)
        self.num_ready: int | None = None
        self._client = client
        self._on_stepped = on_stepped
        self._read_reasons = read_reasons
        self._changed = asyncio.Event()
        self._num_reads = 0
        self._newest_read = 0
        self._num_offers = 0
        self._batches: OrderedDict[int, PlannedBatch] = OrderedDict()
        self._configs: dict[int, BatchingConfig] = {}
        self._num_restarts = 0
        self._is_closed = False
        self._is_deleted = False

    async def refresh(self, read: Callable[[], Awaitable[Frontier]] | None = None) -> Frontier:
        """Return the frontier, read after this call began; wake all waiting calls.

        Replies may overtake one another: an older frontier must not replace a newer one. `read`
        replaces the read of the frontier, where the caller needs more than that.
        """
        while True:
            self._num_reads += 1
            number, num_offers = self._num_reads, self._num_offers
            frontier = await (read() if read else read_frontier_async(self._client, self.run))
            if num_offers != self._num_offers:
                continue
            if number > self._newest_read:
                self._newest_read = number
                self._set_frontier(frontier)
            return self.frontier

    def offer(self, batch: PlannedBatch) -> None:
        """Serve a batch that was planned here, without reading it back."""
        self._num_offers += 1
        self._keep(batch)
        self._set_frontier(dataclasses.replace(self.frontier, planned=batch.manifest.step))

    async def wait_for_change(self, wait_s: float) -> bool:
        """Wait until the frontier is read again; return False after `wait_s` without it."""
        try:
            async with asyncio.timeout(max(0.0, wait_s)):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def reset(self) -> None:
        """Drop the caches after a restart of the store, which may have lost what they hold."""
        self._batches.clear()
        self._configs.clear()
        self._num_restarts += 1

    def close(self) -> None:
        """Refuse all waiting calls: this replica stops."""
        self._is_closed = True
        self._wake()

    def mark_deleted(self) -> None:
        """Refuse all waiting calls, and drop the caches: the run was deleted."""
        self._is_deleted = True
        self._wake()
        self._on_stepped(self.frontier.planned)

    async def wait_for_batch(
        self,
        step: int,
        *,
        read: Callable[[], Awaitable[Frontier]] | None = None,
        check: Callable[[Frontier], None],
        wait_s: float,
    ) -> PlannedBatch:
        """Return the batch of a step, once it is planned; `check` may raise after every change.

        The first read of the frontier may be that of the caller, by `read`.

        Raises:
            BatcherUnavailableError: this replica stops.
            NotReadyError: it was not planned within `wait_s`, with the reason; or the store was
                restarted and may have lost acknowledgements of the trainer.
            EndOfRunError: the run ended before this step.
        """
        deadline_s = asyncio.get_running_loop().time() + wait_s
        num_restarts = self._num_restarts
        await self.refresh(read)  # an expired session must not be served from an older state
        while True:
            if self._is_closed:
                raise BatcherUnavailableError("this replica stops")
            if self._is_deleted:
                raise RunNotFoundError(f"run {self.run!r} was deleted")
            changed = self._changed
            check(self.frontier)
            if step <= self.frontier.planned:
                return await self.batch(step)
            if self.frontier.is_finished and self.frontier.stepped >= self.frontier.planned:
                raise EndOfRunError(f"run {self.run!r} ended with step {self.frontier.planned}")
            if self._num_restarts > num_restarts:
                raise NotReadyError(f"step {step}: the store was restarted")
            try:
                async with asyncio.timeout_at(deadline_s):
                    await changed.wait()
            except TimeoutError:
                raise await self._not_planned(step) from None

    async def batch(self, step: int) -> PlannedBatch:
        """Return the plan of a planned step.

        A cached plan counts only while the store has it: after a power cut another plan may have
        its number.
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
        """Return the config of a revision, which the store may have lost in a power cut."""
        config = self._configs.get(revision)
        if config is None:
            text = await self._call("HGET", keys.run_keys(self.run).config, revision)
            if text is None:
                raise NotReadyError(f"run {self.run!r}: config revision {revision} is not there")
            config = self._configs[revision] = decode_config(text, run=self.run)
        return config

    async def newest_config(self) -> tuple[int, BatchingConfig]:
        """Return the number and the config of the revision in force."""
        return await read_config_async(self._client, self.run)

    def _keep(self, batch: PlannedBatch) -> None:
        self._batches[batch.manifest.step] = batch
        while len(self._batches) > _MANIFESTS_KEPT:
            self._batches.popitem(last=False)

    def _set_frontier(self, frontier: Frontier) -> None:
        self.frontier = frontier
        self._on_stepped(frontier.stepped)
        self._wake()

    def _wake(self) -> None:
        """Wake all waiting calls; later ones wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _not_planned(self, step: int) -> NotReadyError:
        reasons = await self._read_reasons(self.run)
        frontier = self.frontier
        why = f"step {step}: {frontier.planned} steps are planned, {frontier.stepped} are stepped"
        if reasons:
            why += f"; {reasons[0].sentence}"
        return NotReadyError(why, reasons)

    async def _call(self, *words: str | int) -> Any:
        with translating():
            return await self._client.execute_command(*words)
