"""A store with batchers and trainers around it, in the process of a test."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, cast

import testkit
from testkit.runs.run_driver import RunDriver
from testkit.training.trainers import Trainer
from turnstream.batching.config import BatchingConfig
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import (
    Group,
    Purpose,
    TrajectoryState,
)
from turnstream_server.batcher.serving.service import BatcherOptions, serving
from turnstream_server.ledger.admin.dead_letters import DeadLetters, read_dead_letters
from turnstream_server.ledger.core.frontier import Frontier, read_frontier
from turnstream_server.ledger.queries.ledger import LedgerCounts, read_ledger
from turnstream_server.ledger.queries.run_snapshot import read_snapshot

_numbers = itertools.count(1)

Hook = Callable[[Any], Awaitable[object]]
before_write: ContextVar[Hook | None] = ContextVar("before_write", default=None)
"""Hook of the replica that a task belongs to."""


class Replica:
    """A batcher in this process."""

    def __init__(self, options: BatcherOptions, before_write: Hook | None) -> None:
        self.address = ""
        self._options = options
        self._before_write = before_write
        self._may_end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when it answers."""
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._serve(ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Stop cleanly."""
        self._may_end.set()
        if self._task is not None:
            await self._task

    async def _serve(self, ready: asyncio.Event) -> None:
        before_write.set(self._before_write)
        async with serving(self._options) as self.address:
            ready.set()
            await self._may_end.wait()


class Cluster:
    """A store, and whatever a test starts around it; all of it ends with the test."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = connect(url)
        self._replicas: list[Replica] = []
        self._trainers: list[Trainer] = []

    def create_run(self, *, batch_groups: int = 2, **fields: Any) -> str:
        """A new run; `fields` replace those of its config."""
        name = f"run {next(_numbers)}"
        defaults = {"max_staleness": 1000, "max_planned_ahead": 1, **fields}
        config: BatchingConfig = dataclasses.replace(testkit.config(batch_groups), **defaults)
        create_run(self.client, name, config)
        return name

    def end_leases(self, run: str, *trajectory_ids: str, ago_s: float = 3600) -> None:
        """Let leases have ended so long ago: those of these trajectories, or all of the run."""
        leases = keys.run_keys(run).leases
        seconds, _ = cast("tuple[int, int]", self.client.time())
        ends: Any = trajectory_ids or self.client.zrange(leases, 0, -1)
        self.client.zadd(leases, dict.fromkeys(ends, (seconds - ago_s) * 1000), xx=True)

    def pass_deadlines(self, run: str) -> None:
        """Let every deadline that the run has been set be over."""
        deadlines = keys.run_keys(run).deadlines
        found: Any = self.client.zrange(deadlines, 0, -1)
        self.client.zadd(deadlines, dict.fromkeys(found, 0), xx=True)

    async def publish(self, run: str, *groups: Group, closes: bool = False) -> None:
        """Send whole groups, in order, and close the run if told so."""

        def send() -> None:
            with Publisher(self.url, run) as publisher:
                for group in groups:
                    publisher.publish(group).result(30)
                if closes:
                    publisher.close_run()

        await asyncio.to_thread(send)

    def open_group(
        self,
        run: str,
        group_id: str,
        *trajectory_ids: str,
        num_samples: int = 1,
        purpose: Purpose = Purpose.TRAIN,
    ) -> None:
        """Open trajectories of a group for the writer "w", which sends no heartbeat."""
        driver = RunDriver(self.client, run)
        driver.do(
            driver.open_samples(group_id, *trajectory_ids, num_samples=num_samples, purpose=purpose)
        )

    def seal(
        self, run: str, trajectory_id: str, *turns: bytes, seal: bytes, lease: Any = 1
    ) -> None:
        """Store the turns and the seal of an open trajectory as they are, and post the seal."""
        driver = RunDriver(self.client, run)
        driver.do(driver.append(*turns, seal, trajectory_id=trajectory_id, seals=True))
        driver.do(driver.post_sealed(trajectory_id, lease, seal))

    def change_records(self, stream: str, change: Callable[[list[bytes]], list[bytes]]) -> None:
        """Write a stream again with other records, under the same ids where they are as many."""
        entries: Any = self.client.xrange(stream)
        self.client.delete(stream)
        changed = change([fields[b"r"] for _, fields in entries])
        for number, record in enumerate(changed):
            entry_id, fields = entries[number]
            self.client.xadd(stream, {**fields, b"r": record}, id=entry_id)

    def damage(self, run: str, trajectory_id: str, *, record: int = 0) -> bytes:
        """Flip a bit of a turn, or of the seal (-1); return the damaged record."""
        damaged = bytearray()

        def flip(records: list[bytes]) -> list[bytes]:
            damaged[:] = records[record]
            damaged[-9] ^= 1
            records[record] = bytes(damaged)
            return records

        self.change_records(keys.trajectory_keys(run, trajectory_id).turns, flip)
        return bytes(damaged)

    async def start_batcher(
        self,
        *,
        before_write: Hook | None = None,
        lease_s: float = 5.0,
        wait_max_s: float = 60.0,
        **others: Any,
    ) -> Replica:
        """Start a replica; `others` are further fields of its options.

        `before_write` is awaited with each checked plan before it is written.
        """
        options = BatcherOptions(
            redis_url=self.url,
            leader_lease_s=lease_s,
            get_wait_max_s=wait_max_s,
            shutdown_grace_s=0.5,
            **others,
        )
        replica = Replica(options, before_write)
        await replica.start()
        self._replicas.append(replica)
        return replica

    def trainer(self, replica: Replica | str, run: str) -> Trainer:
        """A trainer that calls the server at an address."""
        address = replica if isinstance(replica, str) else replica.address
        trainer = Trainer(address, run)
        self._trainers.append(trainer)
        return trainer

    async def serve(self, **fields: Any) -> tuple[str, Trainer]:
        """A new run, and a trainer of it at a new batcher."""
        run = self.create_run(**fields)
        return run, self.trainer(await self.start_batcher(), run)

    async def start_trainer(self, run: str, *, session: str = "s", **options: Any) -> Trainer:
        """Start a batcher, and a session of a trainer of this run at it."""
        trainer = self.trainer(await self.start_batcher(**options), run)
        await trainer.start(session)
        return trainer

    async def started(
        self,
        *groups: Group,
        session: str = "s",
        dp_world_size: int = 1,
        closes: bool = False,
        **fields: Any,
    ) -> tuple[str, Trainer]:
        """Publish groups of a new run, and start a session of its trainer at a new batcher."""
        run, trainer = await self.serve(**fields)
        await self.publish(run, *groups, closes=closes)
        await trainer.start(session, dp_world_size=dp_world_size)
        return run, trainer

    def frontier(self, run: str) -> Frontier:
        """The frontier of a run."""
        return read_frontier(self.client, run)

    def ledger(self, run: str) -> LedgerCounts:
        """The counts of the ledger, which must add up."""
        ledger = read_ledger(self.client, run)
        ledger.check()
        return ledger

    def states(self, run: str) -> dict[TrajectoryState, int]:
        """The number of trajectories by state, where it is not 0."""
        return {state: number for state, number in self.ledger(run).by_state.items() if number}

    def dead_letters(self, run: str) -> DeadLetters:
        """The dead letters of a run."""
        return read_dead_letters(self.client, run)

    def why(self, run: str) -> str:
        """The sentences of `turnstream why`."""
        found = reasons(read_snapshot(self.client, run))
        return "\n".join(reason.sentence for reason in found)

    async def planned(self, run: str, step: int) -> None:
        """Return when this step is planned."""
        await testkit.wait_until_async(
            lambda: self.frontier(run).planned >= step, describe=f"the plan of step {step}"
        )

    async def close(self) -> None:
        """Stop everything."""
        for trainer in self._trainers:
            await trainer.close()
        for replica in self._replicas:
            await replica.stop()
        self.client.close()
