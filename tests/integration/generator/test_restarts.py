"""A store that restarts without acknowledged writes: they are sent again, or reported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testkit import group, ids, wait_until
from testkit.services.stores import Store
from turnstream.errors import StoreBehindError
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.store.run.rewards import RewardOutcome
from turnstream.types import TrajectoryKey
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.leadership.writes import Term, acquire_leadership
from turnstream_server.ledger.release.release import release_payload

pytestmark = pytest.mark.redis

PastOf = Callable[[EmbeddedServer], Any]
KEY = TrajectoryKey("g", 0)
KEEP_S = 0.2
"""Writes are kept for so short a time that a test stops the clock until the store is killed."""


def test_lost_writes_are_sent_again_from_the_opening_to_the_seal(
    own_store: Store, past_of: PastOf
) -> None:
    run = own_store.new_run()

    with Publisher(own_store.url, run, keep_s=60.0) as publisher:
        publisher.publish(group("kept")).result(10)
        past = past_of(own_store.server)
        publisher.publish(group("lost")).result(10)
        half = publisher.trajectory("half", 0, num_samples=1)
        half.append(ids("ab"), ids("c")).result(10)
        past.come_back()
        half.append(ids("abc"), ids("d")).result(10)
        half.seal(1.0)
        publisher.flush()
        statistics = publisher.statistics()

    stored = own_store.read(run)
    assert stored.counts() == {"accepted": 5, "sealed": 5}
    assert stored.spelled(TrajectoryKey("half", 0)) == [("ab", "c"), ("abc", "d")]
    assert stored.spelled(TrajectoryKey("lost", 0)) == stored.spelled(TrajectoryKey("kept", 0))
    assert len(stored.sealed()) == 5
    assert (statistics.num_restarts, statistics.num_lost) == (1, 0)
    assert statistics.num_trajectories == 5


async def test_finished_adopted_trajectory_is_not_reported_lost(own_store: Store) -> None:
    # After a restart a trajectory is adopted again. If the ledger no longer had it, its publisher
    # reported it as lost.
    run = own_store.new_run()
    names = keys.run_keys(run)

    with Publisher(own_store.url, run, writer="w", keep_s=60.0) as publisher:
        _leave_open(own_store.server, run)
        publisher.adopt("g", 0).seal(1.0)
        await _release(own_store, run, "g/0/0")
        own_store.client.hdel(names.ledger, "g/0/0")
        own_store.client.hdel(names.groups, "g")
        for number in range(2):
            own_store.restart()
            publisher.publish(group(f"h{number}")).result(10)
        publisher.flush()
        statistics = publisher.statistics()

    assert (statistics.num_restarts, statistics.num_lost) == (2, 0)


def test_adoption_of_a_lost_opening_is_reported_by_the_next_flush(
    own_store: Store, past_of: PastOf
) -> None:
    run = own_store.new_run()

    with Publisher(own_store.url, run, writer="w", keep_s=60.0) as publisher:
        past = past_of(own_store.server)
        _leave_open(own_store.server, run)
        publisher.adopt("g", 0).seal(1.0)
        past.come_back()
        publisher.publish(group("h")).result(10)

        with pytest.raises(StoreBehindError, match="g/0/0 was acknowledged, and the store lost it"):
            publisher.flush()


def test_adoption_that_survived_one_restart_is_repeated_after_the_next(
    own_store: Store, past_of: PastOf
) -> None:
    # An adoption that survived one restart was not repeated after the next restart had lost it, and
    # acknowledged writes were lost.
    run = own_store.new_run()
    _leave_open(own_store.server, run)
    own_store.client.zadd(keys.run_keys(run).leases, {"g/0/0": 1})
    past = past_of(own_store.server)

    with Publisher(own_store.url, run, writer="x", keep_s=60.0) as publisher:
        publisher.adopt("g", 0).seal(1.0)
        own_store.restart()  # with all its data
        publisher.publish(group("h")).result(10)
        publisher.flush()
        past.come_back()
        publisher.publish(group("i")).result(10)
        publisher.flush()
        statistics = publisher.statistics()

    assert own_store.read(run).counts() == {"accepted": 5, "sealed": 5}
    assert (statistics.num_restarts, statistics.num_lost) == (2, 0)


async def _release(store: Store, run: str, trajectory_id: str) -> None:
    """Delete the payload of a trajectory, as a leader of the run does."""
    async with connect_async(store.url) as client:
        leadership = await acquire_leadership(client, run, owner="p", lease_s=60.0)
        term = Term(client, run, leadership.epoch)
        await release_payload(term, [trajectory_id], lease_s=60.0)


def _leave_open(server: EmbeddedServer, run: str) -> None:
    """Store one turn of g/0/0, which the same generator may continue at once."""
    with Publisher(server.url, run, writer="w") as publisher:
        publisher.trajectory("g", 0, num_samples=1).append(ids("ab"), ids("c")).result(10)


def test_a_reward_that_the_store_forgot_is_posted_again(
    own_store: Store, past_of: PastOf, clock: Any
) -> None:
    run = own_store.new_run()

    with (
        Publisher(own_store.url, run, keep_s=60.0) as writer,
        Publisher(own_store.url, run, keep_s=KEEP_S) as judge,
    ):
        past = past_of(own_store.server)
        episode = writer.trajectory("g", 0, num_samples=1)
        episode.append(ids("ab"), ids("c"))
        episode.seal(awaits_reward=True)
        posted = judge.post_reward(KEY, 1.0)
        past.come_back()
        clock.resume()
        wait_until(lambda: judge.statistics().num_restarts, describe="a restart")
        before = own_store.read(run).counts()
        writer.publish(group("h")).result(10)
        judge.flush_to_disk(20)
        again = judge.post_reward(KEY, 1.0)

    assert before == {}
    assert (posted, again) == (RewardOutcome.POSTED, RewardOutcome.DUPLICATE)
    assert own_store.read(run).counts() == {"accepted": 3, "sealed": 3}


def test_trajectory_with_lost_old_turns_names_them(own_store: Store, past_of: PastOf) -> None:
    run = own_store.new_run()

    with Publisher(own_store.url, run, keep_s=KEEP_S) as publisher:
        episode = publisher.trajectory("g", 0, num_samples=1)
        episode.append(ids("ab"), ids("c")).result(10)
        past = past_of(own_store.server)
        episode.append(ids("abc"), ids("d")).result(10)
        episode.append(ids("abcd"), ids("e")).result(10)
        publisher.flush_to_disk(20)
        past.come_back()

        with pytest.raises(StoreBehindError, match="g/0/0: the store came back without turns 1 to"):
            episode.append(ids("abcde"), ids("f")).result(10)


def test_lost_sealed_trajectory_is_reported_by_the_next_flush(own_store: Store, clock: Any) -> None:
    run = own_store.new_run()

    with Publisher(own_store.url, run, keep_s=KEEP_S) as publisher:
        publisher.publish(group("g")).result(10)
        own_store.server.kill()
        shutil.rmtree(Path(own_store.server.data_dir) / "appendonlydir")
        own_store.server.restart()
        clock.resume()
        wait_until(lambda: publisher.statistics().num_lost == 2, describe="losses")

        with pytest.raises(StoreBehindError) as lost:
            publisher.flush()
        publisher.flush()  # which tells it once

    errors = [lost.value, *lost.value.others]
    said = [f"g/{sample}/0 was acknowledged, and the store lost it" for sample in range(2)]
    assert sorted(str(error).partition(":")[0] for error in errors) == said
