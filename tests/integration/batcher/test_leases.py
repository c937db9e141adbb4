"""Trajectories of generators that are killed, stopped or cut off, end to end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest

from testkit import group, ids, wait_until_async
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.types import TrajectoryState
from turnstream_server.batcher.planner import timekeeper
from turnstream_server.bus.queries.ledger import LedgerCounts, read_ledger
from turnstream_server.embedded import EmbeddedServer

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

LEASE_S = 2.0
TAKEOVER_S = 600.0
"""For so long a generator of a test may stand still and lose nothing; the leases of the dead are
let end longer ago."""

STEADY_S = 2
"""So long the clock is watched before a lease counts as ended: long enough for a writer that lives
to be heard again."""

BEATS_PER_S = 5
READS_PER_S = 50

# Opens a group of two, writes turns of both samples, and then does what it is told, line by line.
GENERATOR = """
import sys
from turnstream.errors import TurnstreamError
from turnstream.generator import Publisher
from turnstream.generator.outbox import heartbeats
from testkit import ids

url, run, name = sys.argv[1:4]
heartbeats.BEATS_PER_LEASE = float(sys.argv[4])
with Publisher(url, run, writer=name) as publisher, publisher.group(name, 2) as visit:
    for sample in range(2):
        episode = visit.trajectory(sample)
        episode.append(ids("ab"), ids("c")).result(10)
        episode.append(ids("abcd"), ids("e")).result(10)
    print("wrote", flush=True)
    for line in sys.stdin:
        try:
            for sample in range(2):
                episode = visit.trajectory(sample)
                episode.append(ids("abcdef"), ids("g")).result(10)
                episode.seal(float(sample))
            print("sealed", flush=True)
        except TurnstreamError as error:
            print(type(error).__name__, error, flush=True)
"""


class Generator:
    """A generator process, which is the writer of a group of its own name."""

    def __init__(self, url: str, run: str, name: str, *, lease_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", GENERATOR, url, run, name, str(BEATS_PER_S * lease_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def reply(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    async def finish(self) -> str:
        """Let it write and seal; what it says."""
        assert self.process.stdin is not None
        self.process.stdin.write("finish\n")
        self.process.stdin.flush()
        return await self.reply()

    def close(self) -> None:
        """Be sure that it has ended."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
async def generate() -> AsyncIterator[Callable[..., Any]]:
    """Starts a generator that has written its turns: call it with url, run and its name."""
    with ExitStack() as stack:

        async def start(url: str, run: str, name: str, *, lease_s: float = LEASE_S) -> Generator:
            generator = Generator(url, run, name, lease_s=lease_s)
            stack.callback(generator.close)
            assert await generator.reply() == "wrote"
            return generator

        yield start


class Observer:
    """Asks the store what it holds of a run."""

    def __init__(self, url: str, run: str) -> None:
        self.client = connect(url)
        self.run = run
        self.keys = keys.run_keys(run)

    def counts(self) -> LedgerCounts:
        """The counts, which must add up."""
        found = read_ledger(self.client, self.run)
        found.check()
        return found

    async def until(self, **states: int) -> None:
        """Wait until so many trajectories are in these states."""

        async def is_so() -> bool:
            found = self.counts().by_state
            return all(found[TrajectoryState(state)] == number for state, number in states.items())

        await wait_until_async(is_so, describe=f"{states}")

    async def renewed_for(self, seconds: int, *, trajectory_id: str) -> None:
        """Wait until a lease was renewed as often as its writer does it in this time."""
        ends: set[Any] = set()

        async def is_so() -> bool:
            ends.add(self.client.zscore(self.keys.leases, trajectory_id))
            return len(ends) > BEATS_PER_S * seconds

        await wait_until_async(is_so, describe=f"renewals of {trajectory_id}")

    async def looked(self, times: int) -> None:
        """Wait until the timekeeper has looked at the store's clock so often."""
        looks: set[Any] = set()

        async def is_so() -> bool:
            looks.add(self.client.hget(self.keys.clock, "at_ms"))
            return len(looks) > times

        await wait_until_async(is_so, describe=f"{times} looks at the clock")

    def now_ms(self) -> int:
        """The time of the store."""
        seconds, microseconds = cast("tuple[int, int]", self.client.time())
        return seconds * 1000 + microseconds // 1000

    def end_leases(self, ended_ms: float) -> None:
        """Set the store's clock so that every lease has ended."""
        found: Any = self.client.zrange(self.keys.leases, 0, -1)
        self.client.zadd(self.keys.leases, dict.fromkeys(found, ended_ms), xx=True)

    def ledger(self) -> dict[str, str]:
        """Where every trajectory is."""
        found: Any = self.client.hgetall(self.keys.ledger)
        return {name.decode(): entry.decode() for name, entry in found.items()}


@pytest.fixture
def observe() -> Iterator[Callable[..., Observer]]:
    """`observe(url, run)` gives an observer."""
    with ExitStack() as stack:

        def start(url: str, run: str) -> Observer:
            observer = Observer(url, run)
            stack.callback(observer.client.close)
            return observer

        yield start


async def test_turns_of_a_killed_generator_are_adopted_and_trained_once(house, generate, observe):
    run, trainer = await house.serve(batch_groups=1, takeover_s=TAKEOVER_S)
    doomed = await generate(house.url, run, "first")
    doomed.process.kill()
    doomed.process.wait()
    house.end_leases(run, ago_s=1)

    def go_on() -> None:
        with Publisher(house.url, run, writer="second") as publisher:
            for lapsed in publisher.lapsed():
                episode = publisher.adopt(*lapsed.key)
                last = episode.turns[-1]
                context = [*last.prompt_ids, *last.response_ids, ord("f")]
                episode.append(context, ids("g"))
                episode.seal(float(lapsed.key.sample))

    await asyncio.to_thread(go_on)
    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert pulled.rows == ["abCdEfG", "abCdEfG"]
    assert pulled.mini_batch.rows.group_id == ["first", "first"]
    counts = observe(house.url, run).counts()
    assert (counts.accepted, counts.by_state[TrajectoryState.PLANNED]) == (2, 2)


async def test_group_of_a_killed_generator_is_abandoned_and_makes_room(house, generate, observe):
    one_group = {"batch_groups": 1, "max_staleness": 0, "max_planned_ahead": 0}
    run, trainer = await house.serve(**one_group, lease_s=LEASE_S, takeover_s=TAKEOVER_S)
    doomed = await generate(house.url, run, "first")
    doomed.process.kill()
    doomed.process.wait()

    house.end_leases(run)
    await house.publish(run, group("g"))  # waits for leave
    await trainer.start()
    (pulled,) = await trainer.get(1)

    observer = observe(house.url, run)
    assert pulled.mini_batch.rows.group_id == ["g", "g"]
    assert observer.ledger()["first/0/0"] == "abandoned:the lease of first ended"
    assert observer.client.hget(observer.keys.groups, "first") == b"2:incomplete"
    assert observer.client.hget(observer.keys.frontier, "live_groups") == b"1"
    assert observer.counts().by_state[TrajectoryState.ABANDONED] == 2


async def test_living_generators_lose_nothing_while_the_store_stands_still(
    house_at, generate, observe, tmp_path, monkeypatch
):
    lease_s, pause_s = 30.0, 1.0
    monkeypatch.setattr(timekeeper, "READS_PER_LEASE", READS_PER_S * lease_s)
    monkeypatch.setattr(timekeeper, "TOLERANCE_LEASES", pause_s / 2 / lease_s)
    monkeypatch.setattr(timekeeper, "STEADY_LEASES", STEADY_S / lease_s)
    with EmbeddedServer(tmp_path) as server:
        house = house_at(server.url)
        run = house.create_run(batch_groups=1, lease_s=lease_s)
        await house.start_batcher()
        generators = [await generate(house.url, run, name, lease_s=lease_s) for name in ("a", "b")]
        observer = observe(house.url, run)
        await observer.renewed_for(STEADY_S, trajectory_id="a/0/0")  # the timekeeper is at work

        pids = [generator.process.pid for generator in generators]
        ended_ms = observer.now_ms() + 1000 * pause_s / 2
        _signal_all(signal.SIGSTOP, *pids, server.pid)
        ending = asyncio.create_task(asyncio.to_thread(observer.end_leases, ended_ms))
        await asyncio.to_thread(_wait_in_a_process, pause_s)
        _signal_all(signal.SIGCONT, server.pid)
        await ending
        await observer.looked(3)
        _signal_all(signal.SIGCONT, *pids)
        await observer.renewed_for(STEADY_S, trajectory_id="a/0/0")
        answers = [await generator.finish() for generator in generators]

        assert answers == ["sealed", "sealed"]
        assert observer.counts().by_state[TrajectoryState.ABANDONED] == 0


def _signal_all(number: signal.Signals, *pids: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _wait_in_a_process(seconds: float) -> None:
    """A pause that is the fault under test, and not a wait for something."""
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({seconds})"], check=True)
