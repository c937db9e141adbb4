from __future__ import annotations

import gc

import numpy as np
import pytest

from testkit import group, ids
from testkit.services.stores import Store
from turnstream.errors import (
    ConflictError,
    EndOfRunError,
    InvalidTurnError,
    RunNotFoundError,
    StoreUnavailableError,
)
from turnstream.generator import Publisher
from turnstream.generator.encode.encoder import TurnRecord
from turnstream.types import GroupOpened, RunClosed, SealedTrajectory, TrajectoryKey
from turnstream_server.ledger.queries.ledger import read_ledger

pytestmark = pytest.mark.redis


def test_a_refused_turn_leaves_the_trajectory_usable(store: Store) -> None:
    run = store.new_run()

    with (
        Publisher(store.url, run) as publisher,
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

    assert store.read(run).spelled(TrajectoryKey("g", 0)) == [("ab", "cd")]


def test_a_reason_may_quote_anything(store: Store) -> None:
    run = store.new_run()

    with Publisher(store.url, run) as publisher:
        publisher.trajectory("h", 0, num_samples=1).abandon("never opened").result(10)
        episode = publisher.trajectory("g", 0, num_samples=1)
        episode.append(ids("ab"), ids("c"))
        episode.abandon("model said \ud800:{}\r\n" + "x" * 1000).result(10)

    (entry,) = store.read(run).ledger().values()
    assert entry.startswith("abandoned:model said ?:{}\r\nxxx")
    assert len(entry) < 300


def test_unread_failure_is_raised_by_flush(store: Store) -> None:
    publisher = Publisher(store.url, "nobody")
    publisher.publish(group("g"))

    with pytest.raises(RunNotFoundError):
        publisher.flush(10)

    publisher.close()


def test_closing_the_run_comes_after_everything_accepted(store: Store) -> None:
    run = store.new_run()

    with Publisher(store.url, run) as publisher:
        publisher.publish(group("g"))
        publisher.close_run("done")
        with pytest.raises(EndOfRunError):
            publisher.publish(group("h")).result(10)

    kinds = [type(event) for event in store.read(run).events()]
    assert kinds == [GroupOpened, SealedTrajectory, SealedTrajectory, RunClosed]


def test_a_closed_publisher_takes_nothing(store: Store) -> None:
    publisher = Publisher(store.url, store.new_run())
    publisher.close()
    publisher.close()

    with pytest.raises(StoreUnavailableError, match="closed"):
        publisher.publish(group("g"))


def test_closed_publisher_keeps_no_record_in_memory(store: Store) -> None:
    run = store.new_run()
    gc.collect()
    gc.disable()  # a cycle would keep them until its next collection
    try:
        with Publisher(store.url, run) as publisher:
            publisher.publish(group("g"))
            publisher.close_run("done")
        del publisher
        left = [each for each in gc.get_objects() if isinstance(each, TurnRecord)]
    finally:
        gc.enable()

    assert left == []


def test_conflicts_are_counted_in_the_run_with_the_last_one_named(store: Store) -> None:
    run = store.new_run()
    with Publisher(store.url, run, writer="w") as publisher:
        with publisher.trajectory("g", 0, num_samples=1) as writer:
            writer.append(ids("ab"), ids("CD")).result(10)
            for _ in range(2):
                with Publisher(store.url, run, writer="w") as other:
                    changed = other.trajectory("g", 0, num_samples=1)
                    with pytest.raises(ConflictError, match="turn 0 has another content"):
                        changed.append(ids("ab"), ids("CE")).result(10)
            writer.seal(awaits_reward=True)
        publisher.post_reward(TrajectoryKey("g", 0), 1.0)
        counts = read_ledger(store.client, run)
        with pytest.raises(ConflictError, match="another reward"):
            publisher.post_reward(TrajectoryKey("g", 0), 2.0)

    assert counts.num_conflicts == 2
    assert counts.last_conflict == "g/0/0: turn 0 has another content"
    after = read_ledger(store.client, run)
    assert (after.num_conflicts, after.last_conflict) == (3, "g/0/0: another reward was posted")
