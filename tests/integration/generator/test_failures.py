from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import redis

from testkit import group, ids, trajectory, turn
from turnstream.errors import (
    ConflictError,
    EndOfRunError,
    FencedError,
    InvalidTurnError,
    RunNotFoundError,
    StoreUnavailableError,
)
from turnstream.generator import Publisher
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.types import (
    GroupOpened,
    RunClosed,
    SealedTrajectory,
    TrajectoryKey,
)
from turnstream_server.bus.queries.ledger import read_ledger
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

NewRun = Callable[..., str]
Read = Callable[[redis.Redis, str], Any]


def test_a_refused_turn_leaves_the_trajectory_usable(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with (
        Publisher(server.url, run) as publisher,
        publisher.trajectory("g", 0, num_samples=1) as episode,
    ):
        with pytest.raises(InvalidTurnError, match="turns: there is none"):
            episode.seal(1.0)
        with pytest.raises(InvalidTurnError, match="logprobs: nan at position 1"):
            episode.append(ids("ab"), ids("cd"), logprobs=[-1, np.nan])
        episode.append(ids("ab"), ids("cd"))
        with pytest.raises(InvalidTurnError, match="reward: inf is not finite"):
            episode.seal(float("inf"))
        episode.seal(1.0)

    assert read(client, run).spelled(TrajectoryKey("g", 0)) == [("ab", "cd")]


def test_a_group_with_a_wrong_turn_is_refused_whole(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)
    wrong = group("g", trajectory(sample=0), trajectory(turn("a", "B"), turn("ab", ""), sample=1))
    object.__setattr__(wrong.trajectories[1].turns[1], "logprobs", np.zeros(3, np.float32))

    with (
        Publisher(server.url, run) as publisher,
        pytest.raises(InvalidTurnError, match=r"trajectories\[1\]\.turns\[1\]\.logprobs"),
    ):
        publisher.publish(wrong)

    assert read(client, run).events() == []


def test_a_reason_may_quote_anything(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with Publisher(server.url, run) as publisher:
        episode = publisher.trajectory("g", 0, num_samples=1)
        episode.append(ids("ab"), ids("c"))
        episode.abandon("model said \ud800:{}\r\n" + "x" * 1000).result(10)

    (entry,) = read(client, run).ledger().values()
    assert entry.startswith("abandoned:model said ?:{}\r\nxxx")
    assert len(entry) < 300


def test_a_conflict_stops_one_trajectory_and_no_other(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)
    with Publisher(server.url, run, writer="w") as earlier:
        earlier.trajectory("g", 0, num_samples=2).append(ids("ab"), ids("c")).result(10)

        with Publisher(server.url, run, writer="w") as publisher:
            both = group("g", trajectory(turn("ab", "X")), trajectory(turn("ab", "Y"), sample=1))
            receipt = publisher.publish(both)
            with pytest.raises(ConflictError, match="turn 0 has another content"):
                receipt.result(10)

    assert list(receipt.errors) == [TrajectoryKey("g", 0)]
    assert read(client, run).states() == {"g/0/0": "open", "g/1/0": "sealed"}
    assert read(client, run).spelled(TrajectoryKey("g", 0)) == [("ab", "c")]


def test_another_writer_cannot_have_the_same_trajectory(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(client)

    with Publisher(server.url, run, writer="first") as first, Publisher(server.url, run) as second:
        first.trajectory("g", 0, num_samples=1).append(ids("ab"), ids("c")).result(10)
        with pytest.raises(ConflictError, match="being written by first"):
            second.trajectory("g", 0, num_samples=1).append(ids("ab"), ids("c"))


def test_a_writer_whose_lease_was_taken_is_fenced(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)
    key = TrajectoryKey("g", 0)

    with Publisher(server.url, run) as publisher:
        episode = publisher.trajectory("g", 0, num_samples=1)
        episode.append(ids("ab"), ids("c")).result(10)
        client.hset(keys.trajectory_keys(run, "g/0/0").meta, "epoch", 2)
        receipt = episode.append(ids("abc"), ids("d"))
        with pytest.raises(FencedError, match="epoch 2 writes, not 1"):
            receipt.result(10)
        for write in (lambda: episode.append(ids("a"), ids("e")), lambda: episode.seal(1.0)):
            with pytest.raises(FencedError):
                write()

    assert read(client, run).spelled(key) == [("ab", "c")]
    assert read(client, run).states() == {"g/0/0": "open"}


def test_a_run_that_does_not_exist_is_named(server: EmbeddedServer, client: redis.Redis) -> None:
    with Publisher(server.url, "nobody") as publisher:
        with pytest.raises(RunNotFoundError):
            publisher.trajectory("g", 0, num_samples=1).append(ids("ab"), ids("c"))
        with pytest.raises(RunNotFoundError):
            publisher.publish(group("g")).result(10)


def test_unread_failure_is_raised_by_flush(server: EmbeddedServer, client: redis.Redis) -> None:
    publisher = Publisher(server.url, "nobody")
    publisher.publish(group("g"))

    with pytest.raises(RunNotFoundError):
        publisher.flush(10)

    publisher.close()


def test_closing_the_run_comes_after_everything_accepted(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with Publisher(server.url, run) as publisher:
        publisher.publish(group("g"))
        publisher.close_run("done")
        with pytest.raises(EndOfRunError):
            publisher.publish(group("h")).result(10)

    kinds = [type(event) for event in read(client, run).events()]
    assert kinds == [GroupOpened, SealedTrajectory, SealedTrajectory, RunClosed]


def test_a_closed_publisher_takes_nothing(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun
) -> None:
    publisher = Publisher(server.url, new_run(client))
    publisher.close()
    publisher.close()

    with pytest.raises(StoreUnavailableError, match="closed"):
        publisher.publish(group("g"))


def test_names_of_any_kind_reach_the_store(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with Publisher(server.url, run, writer="host:1/{x}") as publisher:
        publisher.publish(group("prompt {1}/ü"))

    stored = read(client, run)
    assert stored.sealed() == [TrajectoryKey("prompt {1}/ü", 0), TrajectoryKey("prompt {1}/ü", 1)]
    for key in stored.sealed():
        assert decode_event(stored.records(key)[-1]) in stored.events()


def test_conflicts_are_counted_in_the_run_with_the_last_one_named(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(client)
    with Publisher(server.url, run, writer="w") as publisher:
        with publisher.trajectory("g", 0, num_samples=1) as writer:
            writer.append(ids("ab"), ids("CD")).result(10)
            for _ in range(2):
                with Publisher(server.url, run, writer="w") as other:
                    changed = other.trajectory("g", 0, num_samples=1)
                    with pytest.raises(ConflictError, match="turn 0 has another content"):
                        changed.append(ids("ab"), ids("CE")).result(10)
            writer.seal(awaits_reward=True)
        publisher.post_reward(TrajectoryKey("g", 0), 1.0)
        counts = read_ledger(client, run)
        with pytest.raises(ConflictError, match="another reward"):
            publisher.post_reward(TrajectoryKey("g", 0), 2.0)

    assert counts.num_conflicts == 2
    assert counts.last_conflict == "g/0/0: turn 0 has another content"
    after = read_ledger(client, run)
    assert (after.num_conflicts, after.last_conflict) == (3, "g/0/0: another reward was posted")
