"""Two batcher processes on one store: a stream whose replica is frozen continues with the other.

A frozen process (SIGSTOP) keeps its connections open and answers nothing. Its planner loses its
lease after 5 s, and the other replica plans the next batch. Batchers that come back at another
address are found in the store.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import turnstream
from testkit import config, group, trajectory, wait_until
from testkit.services.processes import batcher_process, frozen
from turnstream.errors import UnavailableError, WaitKind
from turnstream.generator import Publisher
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream.types import Turn
from turnstream.worker import BatchStream
from turnstream.worker._replicas import KEEPALIVE_EVERY_S, KEEPALIVE_WITHIN_S
from turnstream.worker.observer import ObserverStream
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.core.frontier import Frontier, read_frontier

pytestmark = [pytest.mark.grpc, pytest.mark.redis]

TIMEOUT_S = 20.0
"""The other replica should have answered within 10 s."""

NOTICED_S = KEEPALIVE_EVERY_S + KEEPALIVE_WITHIN_S + 2.0
"""By then a stream has noticed that its replica is frozen."""

LARGE = 1_000_000
"""Tokens of a trajectory that does not fit into the window of a connection."""


class Replica(NamedTuple):
    """A batcher process."""

    pid: int
    address: str

    def frozen(self) -> contextlib.AbstractContextManager[None]:
        """Stop the process inside a block."""
        return frozen(self.pid)

    @property
    def num_connections(self) -> int:
        """Number of established TCP connections to this replica."""
        port = f":{int(self.address.rpartition(':')[2]):04X}"
        tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table.splitlines()[1:]]
        return sum(remote.endswith(port) and state == "01" for _, _, remote, state, *_ in rows)


class Pair:
    """A store and two replicas."""

    def __init__(self, server: EmbeddedServer, first: Replica, second: Replica) -> None:
        self.server, self.first, self.second = server, first, second
        self.target = f"{first.address},{second.address}"

    def create_run(self, name: str, **fields: Any) -> str:
        """Create a run that never makes a generator wait."""
        changes = {"max_staleness": 1000, "mini_batch_groups": 1, **fields}
        with connect(self.server.url) as client:
            create_run(client, name, replace(config(fields.get("batch_groups", 1)), **changes))
        return name

    def publish(self, run: str, *names: str, num_tokens: int = 3) -> None:
        """Publish groups of two trajectories."""
        turn = Turn(
            prompt_ids=np.arange(2, dtype=np.int32),
            response_ids=np.arange(num_tokens, dtype=np.int32),
            logprobs=np.zeros(num_tokens, np.float32),
        )
        members = [trajectory(turn, sample=sample, reward=float(sample)) for sample in range(2)]
        with Publisher(self.server.url, run) as publisher:
            for name in names:
                publisher.publish(group(name, *members)).result(30)

    def frontier(self, run: str) -> Frontier:
        """Return how far the run is."""
        with connect(self.server.url) as client:
            return read_frontier(client, run)

    def content(self, run: str, num_steps: int) -> list[tuple[int, str]]:
        """Return (step, content hash) of the first mini-batches, as an observer receives them."""
        with ObserverStream(self.second.address, run, "control", first_step=1) as stream:
            return [identity(each) for each in until(stream, num_steps)]


def until(stream: Any, num_steps: int) -> Iterator[Any]:
    for mini_batch in stream:
        yield mini_batch
        if mini_batch.is_last and mini_batch.info.step == num_steps:
            return


def identity(mini_batch: Any) -> tuple[int, str]:
    return mini_batch.info.step, mini_batch.content_hash


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("replicas")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer())
        replicas = [
            Replica(*stack.enter_context(batcher_process(server.url, folder / name)))
            for name in ("a", "b")
        ]
        yield Pair(server, *replicas)


def test_waiting_get_continues_with_the_other_replica(pair: Pair) -> None:
    # A trainer stayed with a frozen replica for 150 s and more, although another one was healthy:
    # its new channel got the connection of the old one.
    run = pair.create_run("waiting")
    pair.publish(run, "g1")
    with BatchStream(f"ipv4:{pair.target}", run, timeout_s=TIMEOUT_S) as stream:
        trained = [identity(next(stream))]
        stream.stepped()

        with pair.first.frozen():
            pair.publish(run, "g2")
            trained.append(identity(next(stream)))
            stream.stepped()
        with pair.second.frozen():
            pair.publish(run, "g3")
            trained.append(identity(next(stream)))
            stream.stepped()

    assert trained == pair.content(run, 3)
    assert [step for step, _ in trained] == [1, 2, 3]
    assert pair.frontier(run).stepped == 3


def test_half_received_batch_continues_with_the_other_replica(pair: Pair) -> None:
    run = pair.create_run("half", batch_groups=2)
    pair.publish(run, "g1", "g2", num_tokens=LARGE)
    with BatchStream(pair.target, run, timeout_s=TIMEOUT_S, max_prefetch_bytes=1) as stream:
        wait_until(lambda: stream.statistics().queued_mini_batches, describe="the first mini-batch")

        with pair.first.frozen():
            trained = [identity(each) for each in until(stream, 1)]
            stream.stepped()
        num_damaged = stream.statistics().num_damaged

    assert len(trained) == 2
    assert trained == pair.content(run, 1)
    assert num_damaged == 0


def test_acknowledgement_continues_with_the_other_replica(pair: Pair) -> None:
    run = pair.create_run("acknowledged")
    pair.publish(run, "g1", "g2")
    with BatchStream(pair.target, run, timeout_s=TIMEOUT_S) as stream:
        next(stream)

        with pair.first.frozen():
            token = stream.stepped()
            stream.committed(token)
            second = next(stream)
        stream.stepped()

    frontier = pair.frontier(run)
    assert (token.step, second.info.step) == (1, 2)
    assert (frontier.stepped, frontier.committed) == (2, 1)


def ending(call: Callable[[], object]) -> UnavailableError:
    with pytest.raises(UnavailableError) as caught:
        call()
    return caught.value


def test_silent_store_keeps_a_stream_at_its_replica(pair: Pair) -> None:
    # All replicas answer pings while their store stands still: another one would not help.
    run = pair.create_run("store")
    pair.publish(run, "g1")
    store = Replica(pair.server.pid, "127.0.0.1:0")
    num_before = pair.second.num_connections
    with BatchStream(pair.target, run, timeout_s=NOTICED_S) as stream:
        next(stream)

        with store.frozen():
            error = ending(stream.stepped)
            num_elsewhere = pair.second.num_connections
        stream.stepped()
        pair.publish(run, "g2")
        second = next(stream)

    assert error.reasons[-1].kind == WaitKind.STORE_AWAY
    assert num_elsewhere == num_before
    assert second.info.step == 2


def test_paused_trainer_keeps_its_transfer(pair: Pair) -> None:
    # A full queue pauses a transfer: the replica is healthy, however long the trainer computes.
    run = pair.create_run("paused", batch_groups=2)
    pair.publish(run, "g1", "g2", num_tokens=LARGE)
    with BatchStream(pair.target, run, timeout_s=TIMEOUT_S, max_prefetch_bytes=1) as stream:
        wait_until(lambda: stream.statistics().queued_mini_batches, describe="the first mini-batch")

        time.sleep(NOTICED_S)
        trained = list(until(stream, 1))
        statistics = stream.statistics()

    assert len(trained) == 2
    assert (statistics.num_retries, statistics.num_damaged) == (0, 0)


_names = itertools.count(1)


@pytest.fixture
def service() -> Iterator[turnstream.Service]:
    """A store of its own: batchers of other tests serve every run of theirs."""
    with EmbeddedServer() as server, turnstream.connect(server.url) as service:
        yield service


def publish(run: turnstream.Run) -> None:
    with run.publisher() as publisher:
        publisher.publish(group(f"g{next(_names)}")).result(30)


def test_waiting_worker_finds_a_batcher_at_another_address(
    service: turnstream.Service, tmp_path: Path
) -> None:
    run = service.create_run("moves", batch_groups=1)
    with ThreadPoolExecutor() as pool:
        with batcher_process(service.url, tmp_path / "first") as (_, first):
            batches = run.batches(timeout_s=120)
            waiting = pool.submit(next, batches)
        publish(run)  # the first batcher was killed, and stays registered for a while
        with batcher_process(service.url, tmp_path / "second") as (_, second):
            assert first != second
            step = waiting.result(100)
            assert len(list(step)) == 1
            assert step.done()
            batches.close()
