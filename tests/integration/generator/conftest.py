"""What a store holds of a run, read back; and what is in a test's hands: answers, and time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import redis

from harness.proxy import Proxy
from testkit.scripts import script
from turnstream.batching.merge.merging import turn_prompts
from turnstream.generator.outbox import heartbeats, outage
from turnstream.generator.transport import async_sender, sender
from turnstream.records.events import decode_event
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.store.waits import bounded_call
from turnstream.types import Event, SealedTrajectory, StoredTurn, TrajectoryKey

LONG_S: Final = 30.0
"""Time for every operation of a test, also on a busy machine."""


class RunReader:
    """Reads what generators wrote to one run."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client = client
        self.run = run
        self.keys = keys.run_keys(run)

    def events(self) -> list[Event]:
        """All events, in order."""
        entries: Any = self.client.xrange(self.keys.events)
        return [decode_event(fields[b"r"]) for _, fields in entries]

    def sealed(self) -> list[TrajectoryKey]:
        """The keys of all seals that were posted, in order."""
        return [event.key for event in self.events() if isinstance(event, SealedTrajectory)]

    def ledger(self) -> dict[str, str]:
        """Where every trajectory is, by its id."""
        found: Any = self.client.hgetall(self.keys.ledger)
        return {name.decode(): state.decode() for name, state in found.items()}

    def states(self) -> dict[str, str]:
        """The same, without reasons, epochs and writers."""
        return {name: entry.partition(":")[0] for name, entry in self.ledger().items()}

    def counts(self) -> dict[str, int]:
        """How many trajectories are in which state; states without any are left out."""
        found: Any = self.client.hgetall(self.keys.counts)
        return {name.decode(): int(count) for name, count in found.items() if int(count)}

    def records(self, key: TrajectoryKey) -> list[bytes]:
        """The stored records of one trajectory."""
        names = keys.trajectory_keys(self.run, keys.trajectory_id(key))
        entries: Any = self.client.xrange(names.turns)
        expected = [f"0-{number}".encode() for number in range(1, len(entries) + 1)]
        assert [entry_id for entry_id, _ in entries] == expected
        return [fields[b"r"] for _, fields in entries]

    def turns(self, key: TrajectoryKey) -> list[StoredTurn]:
        """The turns of one trajectory, without the seal."""
        records = self.records(key)
        return [decode_turn(record) for record in records if record[2:3] == b"T"]

    def spelled(self, key: TrajectoryKey) -> list[tuple[str, str]]:
        """Full prompt and response of every turn, as letters."""
        turns = self.turns(key)
        return [
            (letters(prompt), letters(turn.response_ids))
            for prompt, turn in zip(turn_prompts(turns), turns, strict=True)
        ]

    def frees_capacity(self, *, stepped: int) -> None:
        """Write a plan, as the planner does."""
        self.client.hset(self.keys.frontier, "stepped", stepped)
        self.client.xadd(self.keys.wake, {"w": ""}, maxlen=1, approximate=False)


def letters(ids: Any) -> str:
    """Tokens as text."""
    return "".join(chr(token) for token in ids.tolist())


@pytest.fixture
def read() -> Callable[[redis.Redis, str], RunReader]:
    """`read(client, run)` reads a run back."""
    return RunReader


@pytest.fixture
def proxy_to() -> Iterator[Callable[[str], Proxy]]:
    """`proxy_to(url)` starts a proxy."""
    with contextlib.ExitStack() as stack:
        yield lambda url: stack.enter_context(Proxy(url))


@pytest.fixture
def lose_answer() -> Callable[[Proxy, str], None]:
    """`lose_answer(proxy, "append")`: the next call of that script is done, and its answer lost."""
    return lambda proxy, name: proxy.cut_answers(script(name).sha.encode(), after_bytes=[0])


@pytest.fixture(autouse=True)
def wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`wait_for_answers(seconds)`: for so long beyond its deadline a wait hangs on what was sent.

    A store that is well answers late where its machine is busy. Only where it is meant to be silent
    a test waits no longer than everybody does.
    """

    def wait(seconds: float) -> None:
        for module in (outage, sender, async_sender, bounded_call):
            monkeypatch.setattr(module, "ANSWER_S", seconds)

    wait(LONG_S)
    return wait


class Clock:
    """The time of publishers: it stands still until it is told to go on."""

    def __init__(self) -> None:
        self._stopped_s = time.monotonic()
        self._behind_s: float | None = None

    def monotonic(self) -> float:
        """Seconds, as of `time.monotonic`."""
        if self._behind_s is None:
            return self._stopped_s
        return time.monotonic() - self._behind_s

    def go_on(self, *, ahead_s: float = 0.0) -> None:
        """Run from now on, so much later than it was."""
        self._behind_s = time.monotonic() - self._stopped_s - ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of every publisher that the test makes stands still."""
    clock = Clock()
    for module in (sender, async_sender):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def without_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """No heartbeat travels with what is counted."""
    monkeypatch.setattr(heartbeats, "_FIRST_INTERVAL_S", LONG_S)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of a minute, which end in no test, are renewed ten times a second."""
    monkeypatch.setattr(heartbeats, "BEATS_PER_LEASE", 600)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Publishers end their threads."""
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("turnstream")] == []
