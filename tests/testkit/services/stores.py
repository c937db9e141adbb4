"""The store of a test: its server, a client, and the runs in it, read back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis

import turnstream
from testkit.runs.scripts import script
from testkit.waiting import wait_until
from turnstream.batching.merge.merging import turn_prompts
from turnstream.generator import Publisher
from turnstream.records.events import decode_event
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.store.service_calls import StoreCalls
from turnstream.types import Event, SealedTrajectory, StoredTurn, TrajectoryKey
from turnstream_server.embedded import EmbeddedServer


class RunReader:
    """Reads back the writes of generators to one run."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client = client
        self.run = run
        self.keys = keys.run_keys(run)

    def events(self) -> list[Any]:
        """Return all events, in order."""
        entries: Any = self.client.xrange(self.keys.events)
        decoded: list[Event] = [decode_event(fields[b"r"]) for _, fields in entries]
        return decoded

    def sealed(self) -> list[TrajectoryKey]:
        """Return the keys of all posted seals, in order."""
        return [event.key for event in self.events() if isinstance(event, SealedTrajectory)]

    def ledger(self) -> dict[str, str]:
        """Return the ledger entries by trajectory id."""
        found: Any = self.client.hgetall(self.keys.ledger)
        return {name.decode(): state.decode() for name, state in found.items()}

    def states(self) -> dict[str, str]:
        """Return the ledger without reasons, epochs and writers."""
        return {name: entry.partition(":")[0] for name, entry in self.ledger().items()}

    def counts(self) -> dict[str, int]:
        """Return the number of trajectories by state, without empty states."""
        found: Any = self.client.hgetall(self.keys.counts)
        return {name.decode(): int(count) for name, count in found.items() if int(count)}

    def records(self, key: TrajectoryKey) -> list[bytes]:
        """Return the stored records of one trajectory."""
        names = keys.trajectory_keys(self.run, keys.trajectory_id(key))
        entries: Any = self.client.xrange(names.turns)
        expected = [f"0-{number}".encode() for number in range(1, len(entries) + 1)]
        assert [entry_id for entry_id, _ in entries] == expected
        return [fields[b"r"] for _, fields in entries]

    def turns(self, key: TrajectoryKey) -> list[StoredTurn]:
        """Return the turns of one trajectory, without the seal."""
        records = self.records(key)
        return [decode_turn(record) for record in records if record[2:3] == b"T"]

    def spelled(self, key: TrajectoryKey) -> list[tuple[str, str]]:
        """Return the full prompt and response of every turn, as letters."""
        turns = self.turns(key)
        return [
            (_letters(prompt), _letters(turn.response_ids))
            for prompt, turn in zip(turn_prompts(turns), turns, strict=True)
        ]

    def frees_capacity(self, *, stepped: int) -> None:
        """Record a step and wake the waiting groups, as the planner does."""
        self.client.hset(self.keys.frontier, "stepped", stepped)
        self.client.xadd(self.keys.wake, {"w": ""}, maxlen=1, approximate=False)


def _letters(ids: Any) -> str:
    return "".join(chr(token) for token in ids.tolist())


@dataclass(frozen=True)
class Store:
    """A running store, a client of it, and a maker of its runs."""

    server: EmbeddedServer
    client: redis.Redis
    make_run: Callable[..., str]

    @property
    def url(self) -> str:
        """Return the address of the server."""
        return self.server.url

    def new_run(self, **config: Any) -> str:
        """Create a run with these settings; return its name."""
        return self.make_run(self.client, **config)

    def read(self, run: str) -> RunReader:
        """Return a reader of one run."""
        return RunReader(self.client, run)

    def restart(self) -> None:
        """Kill the server, and start it again with its data."""
        self.server.kill()
        self.server.restart()

    def num_blocked(self) -> int:
        """Return the number of connections in a blocking read."""
        clients: Any = self.client.info("clients")
        return clients["blocked_clients"]

    def wait_for_blocked(self, number: int) -> None:
        """Wait until exactly so many connections are in a blocking read."""
        wait_until(lambda: self.num_blocked() == number, describe=f"{number} blocked reads")


def wait_for_lapse(publisher: Publisher, key: TrajectoryKey) -> None:
    """Wait until the lease of a trajectory has ended."""
    wait_until(
        lambda: key in [lapsed.key for lapsed in publisher.lapsed()], describe="the end of a lease"
    )


def lose_answer(proxy: Any, name: str) -> None:
    """Let the next call of a script succeed, and drop its answer."""
    proxy.break_replies([0], request=script(name).sha.encode())


def client_of(service: turnstream.Service) -> redis.Redis:
    """Return the client of a service that was connected to the store itself."""
    calls = service._calls
    assert isinstance(calls, StoreCalls)
    return calls._client
