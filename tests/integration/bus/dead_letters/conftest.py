"""A run with dead letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import ids
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.types import TrajectoryDied
from turnstream_server.bus.leadership.leadership import Term, acquire_leadership
from turnstream_server.bus.planning.trajectories import Rejection, mark_dead, reject_events
from turnstream_server.bus.queries.ledger import read_ledger


class DeadRun:
    """A run whose trajectories can be published, damaged and marked as dead."""

    def __init__(self, url: str, client: redis.Redis, run: str) -> None:
        self.url = url
        self.client = client
        self.run = run
        self.names = keys.run_keys(run)
        self._epoch = 0

    def publish(self, group_id: str, sample: int, *, num_samples: int = 3) -> None:
        """Publish a sample of two turns."""
        with Publisher(self.url, self.run, writer="generator") as publisher:
            writer = publisher.trajectory(
                group_id, sample, num_samples=num_samples, prompt_uid="uid"
            )
            writer.append(
                ids("ab"), ids("CD"), logprobs=[-0.5, -0.25], policy_version=1, anchor="room 3"
            )
            writer.append(ids("abCDe"), ids("F"), logprobs=[-1.0], policy_version=1)
            writer.seal(float(sample), tags={"split": "a"})

    def records(self, trajectory_id: str) -> list[bytes]:
        """Return the stored records of a trajectory, its seal last."""
        stream = keys.trajectory_keys(self.run, trajectory_id).turns
        entries: Any = self.client.xrange(stream)
        return [fields[b"r"] for _, fields in entries]

    def replace(self, trajectory_id: str, records: list[bytes]) -> None:
        """Store other records of a trajectory."""
        stream = keys.trajectory_keys(self.run, trajectory_id).turns
        self.client.delete(stream)
        for number, record in enumerate(records, start=1):
            self.client.xadd(stream, {"r": record}, id=f"0-{number}")

    def damage(self, trajectory_id: str, *, number: int = 0, at: int = -9) -> None:
        """Flip one bit of a record."""
        records = self.records(trajectory_id)
        damaged = bytearray(records[number])
        damaged[at] ^= 1
        records[number] = bytes(damaged)
        self.replace(trajectory_id, records)

    async def kill(self, *trajectory_ids: str, reason: str = "its bytes are damaged") -> None:
        """Mark trajectories as dead, as a leader does."""
        async with connect_async(self.url) as client:
            epoch = await self._lead(client)
            for name in trajectory_ids:
                died = TrajectoryDied(key=keys.parse_trajectory_id(name), reason=reason)
                await mark_dead(Term(client, self.run, epoch), died)

    async def reject(self, event_id: str, record: bytes) -> bool:
        """Reject an event, as a leader does; return whether it is new."""
        async with connect_async(self.url) as client:
            epoch = await self._lead(client)
            if not self.client.xrange(self.names.events, event_id, event_id):
                self.client.xadd(self.names.events, {"r": record}, id=event_id)
            rejection = Rejection(event_id, "no event", None)
            return bool(await reject_events(Term(client, self.run, epoch), [rejection]))

    async def add(self, name: str) -> None:
        """Publish a trajectory, damage its first turn, and mark it as dead."""
        key = keys.parse_trajectory_id(name)
        self.publish(key.group_id, key.sample)
        self.damage(name)
        await self.kill(name)

    def entry(self, name: str) -> str:
        """Return the ledger entry of a trajectory."""
        entry: Any = self.client.hget(self.names.ledger, name)
        return (entry or b"").decode()

    def check(self) -> None:
        """Check that the states of the ledger add up."""
        read_ledger(self.client, self.run).check()

    async def _lead(self, client: Any) -> int:
        if not self._epoch:
            leadership = await acquire_leadership(client, self.run, owner="test", lease_s=60)
            self._epoch = leadership.epoch
        return self._epoch


@pytest.fixture
def dead_run(server: Any, client: redis.Redis, new_run: Callable[..., str]) -> DeadRun:
    return DeadRun(server.url, client, new_run(client))
