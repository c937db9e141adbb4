"""A run with dead letters, and what is done with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from turnstream.generator import Publisher
from turnstream.records.events import decode_event
from turnstream.store import keys
from turnstream.store.connection import connect_async
from turnstream.testing import ids
from turnstream.types import SealedTrajectory, TrajectoryDied
from turnstream_server.bus.fixes import read_fix, to_json
from turnstream_server.bus.leadership import acquire_leadership
from turnstream_server.bus.ledger import read_ledger
from turnstream_server.bus.letters import open_letter
from turnstream_server.bus.trajectories import Rejection, mark_dead, reject_events


class Office:
    """A run with dead letters, and what is done with them."""

    def __init__(self, url: str, client: redis.Redis, run: str) -> None:
        self.url = url
        self.client = client
        self.run = run
        self.names = keys.run_keys(run)
        self._epoch = 0

    def publish(self, group_id: str, sample: int, *, num_samples: int = 3) -> None:
        """A sample of two turns."""
        with Publisher(self.url, self.run, writer="generator") as publisher:
            writer = publisher.trajectory(
                group_id, sample, num_samples=num_samples, prompt_uid="uid"
            )
            writer.append(
                ids("ab"), ids("CD"), logprobs=[-0.5, -0.25], policy_version=1, anchor="room 3"
            )
            writer.append(ids("abCDe"), ids("F"), logprobs=[-1.0], policy_version=1)
            writer.seal(float(sample), tags={"split": "a"})

    def damage(self, trajectory_id: str, *, at: int = -9, bits: int = 1) -> None:
        """Flip bits of the first turn."""
        stream = keys.trajectory_keys(self.run, trajectory_id).turns
        entries: Any = self.client.xrange(stream)
        records = [bytearray(fields[b"r"]) for _, fields in entries]
        records[0][at] ^= bits
        self.client.delete(stream)
        for number, record in enumerate(records, start=1):
            self.client.xadd(stream, {"r": bytes(record)}, id=f"0-{number}")

    async def kill(self, *trajectory_ids: str, reason: str = "its bytes are damaged") -> None:
        """Set trajectories aside, as a leader does."""
        async with connect_async(self.url) as client:
            epoch = await self._lead(client)
            for name in trajectory_ids:
                died = TrajectoryDied(key=keys.parse_trajectory_id(name), reason=reason)
                await mark_dead(client, self.run, died, leader_epoch=epoch)

    async def keep_event(self, event_id: str, record: bytes) -> bool:
        """Keep an event that nobody can read, as a leader does."""
        async with connect_async(self.url) as client:
            epoch = await self._lead(client)
            if not self.client.xrange(self.names.events, event_id, event_id):
                self.client.xadd(self.names.events, {"r": record}, id=event_id)
            rejection = Rejection(event_id, "no event", None)
            return bool(await reject_events(client, self.run, [rejection], leader_epoch=epoch))

    async def bury(self, name: str, *, at: int = -9, bits: int = 1) -> None:
        """A trajectory that was published, damaged and found."""
        key = keys.parse_trajectory_id(name)
        self.publish(key.group_id, key.sample)
        self.damage(name, at=at, bits=bits)
        await self.kill(name)

    def mend(self, name: str, folder: Path) -> Any:
        """What can be read of a letter, as it is mended by hand."""
        content = open_letter(self.client, self.run, name)
        path = folder / "fix.json"
        path.write_text(to_json(content))
        return read_fix(path, sample=0, seal=content.seal, declared=())

    def decide(self, group_id: str, state: str) -> None:
        """What a leader made of a group."""
        entry: Any = self.client.hget(self.names.groups, group_id)
        samples = entry.decode().partition(":")[0]
        self.client.hset(self.names.groups, group_id, f"{samples}:{state}")

    def entry(self, name: str) -> str:
        """What the ledger says."""
        entry: Any = self.client.hget(self.names.ledger, name)
        return (entry or b"").decode()

    def seals(self) -> list[SealedTrajectory]:
        """Those that the run was told of."""
        entries: Any = self.client.xrange(self.names.events)
        events = [decode_event(fields[b"r"]) for _, fields in entries]
        return [each for each in events if isinstance(each, SealedTrajectory)]

    def check(self) -> None:
        """The states must add up."""
        read_ledger(self.client, self.run).check()

    async def _lead(self, client: Any) -> int:
        if not self._epoch:
            leadership = await acquire_leadership(client, self.run, owner="test", lease_s=60)
            self._epoch = leadership.epoch
        return self._epoch


@pytest.fixture
def office(server: Any, client: redis.Redis, new_run: Callable[..., str]) -> Office:
    return Office(server.url, client, new_run(client))
