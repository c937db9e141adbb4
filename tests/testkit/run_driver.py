"""Commands to one run, sent script by script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import redis

from testkit.scripts import script
from turnstream.store.client import keys
from turnstream.store.client.scripts import Command, run_command, run_commands


class RunDriver:
    """Says and does what generators ask of one run. Records are any bytes."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client = client
        self.name = run
        self.keys = keys.run_keys(run)
        self.payload_keys = keys.trajectory_keys(run, "g/0/0")

    def do(self, command: Command) -> Any:
        """The reply to one command."""
        return run_command(self.client, command)

    def do_all(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to several; refusals are returned."""
        return run_commands(self.client, commands)

    def open_group(
        self, *ids: str, group: str = "g", num_samples: int | str = 2, writer: str = "w"
    ) -> Command:
        """Open a group and samples of it."""
        record = b"opened " + group.encode()
        return script("open_group")(
            self.keys.of_open_group, group, num_samples, writer, record, *ids
        )

    def append(
        self, *records: bytes, first: int = 0, seals: bool = False, lease: str = "1:w"
    ) -> Command:
        """Append to the trajectory g/0/0."""
        return script("append")(self.payload_keys, lease, first, int(seals), *records)

    def post_sealed(self, *items: Any) -> Command:
        """Post seals: id, epoch, record of each."""
        return script("post_sealed")(self.keys.of_post_sealed, *items)

    def abandon(self, trajectory_id: str, epoch: int | str = 1) -> Command:
        """Give a trajectory up because of boredom."""
        names = self.keys
        record = b"abandoned " + trajectory_id.encode()
        abandon_keys = (names.ledger, names.counts, names.events, names.leases)
        return script("abandon")(abandon_keys, trajectory_id, epoch, "bored", record)

    def close(self) -> Command:
        """Close the run."""
        names = self.keys
        return script("close_run")((names.frontier, names.events, names.wake), b"closed")

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
