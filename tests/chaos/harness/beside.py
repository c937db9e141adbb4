"""Small runs beside the one that is trained: what a batcher, or an operator, seldom comes to.

They lie in the same store and are led by the same batchers. Each begins empty, so that what must
have become of it is known to the last trajectory; then it is deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from harness.rig import config
from harness.running import Stack
from testkit import ids
from turnstream.batching.config import BatchingConfig
from turnstream.generator import Publisher
from turnstream.store import keys
from turnstream.store.runs import close_run, create_run
from turnstream_server.bus.deletion import delete_run
from turnstream_server.bus.frontier import Frontier, read_frontier
from turnstream_server.bus.ledger import read_ledger

DECIDED_S = 60.0
"""By when batchers have decided what was left to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A run of one group per batch, which nobody trains."""

    stack: Stack
    run: str
    settings: BatchingConfig

    @property
    def client(self) -> redis.Redis:
        """Of the store."""
        return self.stack.rig.client

    @property
    def frontier(self) -> Frontier:
        """How far it is."""
        return read_frontier(self.client, self.run)

    def seal(self, group: str, *samples: int, num_samples: int) -> None:
        """Publish samples of a group."""
        with self.publisher() as publisher:
            for sample in samples:
                writer = publisher.trajectory(group, sample, num_samples=num_samples)
                writer.append(ids("ab"), ids("CD"))
                writer.seal(float(sample))

    def leave_open(self, group: str, sample: int, *, num_samples: int) -> None:
        """A sample whose generator is gone behind its first turn."""
        with self.publisher() as publisher:
            writer = publisher.trajectory(group, sample, num_samples=num_samples)
            writer.append(ids("ab"), ids("CD")).result()

    def publisher(self) -> Publisher:
        """Goes straight to the store."""
        return Publisher(self.stack.rig.server.url, self.run, writer="beside")

    def damage(self, name: str) -> None:
        """Overwrite a byte of a trajectory's first turn."""
        turns = keys.trajectory_keys(self.run, name).turns
        entries: Any = self.client.xrange(turns)
        records = [bytearray(fields[b"r"]) for _, fields in entries]
        records[0][-9] ^= 1
        with self.client.pipeline(transaction=True) as pipeline:
            pipeline.delete(turns)
            for number, record in enumerate(records, start=1):
                pipeline.xadd(turns, {"r": bytes(record)}, id=f"0-{number}")
            pipeline.execute()

    def create_again(self) -> None:
        """Create the next run of the name, which the deletion of this one has freed."""
        create_run(self.client, self.run, self.settings)

    def close(self) -> None:
        """Let no group begin any more."""
        close_run(self.client, self.run)

    def counts(self) -> dict[str, int]:
        """Trajectories by state, and `accepted`."""
        ledger = read_ledger(self.client, self.run)
        ledger.check()
        states = {str(state): count for state, count in ledger.by_state.items() if count}
        return {"accepted": ledger.accepted, **states}

    def wait_for(self, expected: Mapping[str, int]) -> None:
        """What must have become of every trajectory."""
        self.stack.rig.wait(
            lambda: self.counts() == expected,
            f"{self.run} to be {expected}, it is {self.counts()}",
            timeout_s=DECIDED_S,
        )


@contextlib.contextmanager
def side_run(stack: Stack, **fields: Any) -> Iterator[Side]:
    """A run of the usual config but for these fields; deleted at the end."""
    stack.num_sides += 1
    settings = config(**{"batch_groups": 1, "mini_batch_groups": 1, **fields})
    side = Side(stack=stack, run=f"side-{stack.num_sides}", settings=settings)
    create_run(stack.rig.client, side.run, settings)
    yield side
    delete_run(stack.rig.client, side.run)
