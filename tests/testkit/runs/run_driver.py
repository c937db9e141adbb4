"""Commands to one run, sent script by script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import redis

from testkit.runs.scripts import script
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.scripts import Command, run_command, run_commands
from turnstream.store.run.groups import group_size
from turnstream.types import GroupOpened, Purpose, TrajectoryKey


class RunCommands:
    """The commands of generators to one run. Records are any bytes."""

    def __init__(self, run: str) -> None:
        self.name = run
        self.keys = keys.run_keys(run)

    def open_samples(
        self,
        group_id: str,
        *ids: str,
        num_samples: int = 1,
        num_needed: int = 0,
        purpose: Purpose = Purpose.TRAIN,
        writer: str = "w",
    ) -> Command:
        """Open a group with a readable record, and these trajectories; all samples by default."""
        opened = GroupOpened(
            group_id=group_id,
            prompt_uid="",
            num_samples=num_samples,
            num_needed=num_needed,
            purpose=purpose,
        )
        ids = ids or tuple(TrajectoryKey(group_id, s).trajectory_id for s in range(num_samples))
        words = (keys.encode_name(group_id), group_size(opened), writer, encode_event(opened))
        return script("open_group")(self.keys.of_open_group, *words, *ids)

    def open_group(
        self, *ids: str, group: str = "g", num_samples: int | str = 2, writer: str = "w"
    ) -> Command:
        """Open a group and samples of it."""
        record = b"opened " + group.encode()
        return script("open_group")(
            self.keys.of_open_group, group, num_samples, writer, record, *ids
        )

    def append(
        self,
        *records: bytes,
        trajectory_id: str = "g/0/0",
        first: int = 0,
        seals: bool = False,
        lease: str = "1:w",
    ) -> Command:
        """Append to a trajectory."""
        payload = keys.trajectory_keys(self.name, trajectory_id)
        return script("append")(payload, lease, first, int(seals), *records)

    def post_sealed(self, *items: Any) -> Command:
        """Post seals: id, epoch, record of each."""
        return script("post_sealed")(self.keys.of_post_sealed, *items)

    def abandon(
        self,
        trajectory_id: str,
        epoch: int | str = 1,
        *,
        reason: str = "bored",
        record: bytes = b"",
    ) -> Command:
        """Abandon a trajectory."""
        names = self.keys
        record = record or b"abandoned " + trajectory_id.encode()
        abandon_keys = (names.ledger, names.counts, names.events, names.leases)
        return script("abandon")(abandon_keys, trajectory_id, epoch, reason, record)

    def close(self) -> Command:
        """Close the run."""
        names = self.keys
        where = (names.frontier, names.events, names.wake)
        return script("set_closed")(where, 1, b"closed", "")


class RunDriver(RunCommands):
    """Sends the commands of generators to one run."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        super().__init__(run)
        self.client = client
        self.payload_keys = keys.trajectory_keys(run, "g/0/0")

    def do(self, command: Command) -> Any:
        """The reply to one command."""
        return run_command(self.client, command)

    def do_all(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to several; refusals are returned."""
        return run_commands(self.client, commands)

    def fill(self, *, num_samples: int = 1) -> None:
        """Open the samples of the group g, with a turn each."""
        self.do(self.open_samples("g", num_samples=num_samples))
        ids = [TrajectoryKey("g", sample).trajectory_id for sample in range(num_samples)]
        self.do_all([self.append(b"turn0", trajectory_id=each) for each in ids])

    def events(self) -> list[bytes]:
        """The records of all events."""
        entries: Any = self.client.xrange(self.keys.events)
        return [fields[b"r"] for _, fields in entries]

    def ledger(self) -> dict[bytes, bytes]:
        """Where every trajectory is."""
        found: Any = self.client.hgetall(self.keys.ledger)
        return found

    def counts(self) -> dict[str, int]:
        """How many trajectories are in which state; states without any are left out."""
        found: Any = self.client.hgetall(self.keys.counts)
        return {name.decode(): int(count) for name, count in found.items() if int(count)}

    def turns(self) -> list[tuple[bytes, bytes]]:
        """Ids and records of g/0/0."""
        entries: Any = self.client.xrange(self.payload_keys.turns)
        return [(entry_id, fields[b"r"]) for entry_id, fields in entries]


Drive = Callable[..., RunDriver]
