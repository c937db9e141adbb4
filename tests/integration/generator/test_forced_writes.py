"""Publishers on a store that forces every write to disk before it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from testkit import group, ids, trajectory, turn, wait_until
from testkit.stores import Store
from turnstream.generator import Publisher
from turnstream.generator.api.trajectory_writers import TrajectoryWriter
from turnstream.store.client.connection import connect
from turnstream.types import Trajectory
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis


@pytest.fixture
def forcing_store(new_run: Callable[..., str]) -> Iterator[Store]:
    with EmbeddedServer(durability="fsync") as server, connect(server.url) as client:
        yield Store(server, client, new_run)


def num_groups_of_writes(client: redis.Redis) -> int:
    commands: Any = client.info("commandstats")
    return commands.get("cmdstat_exec", {"calls": 0})["calls"]


def append_side_by_side(client: redis.Redis, publisher: Publisher, *, num_turns: int) -> None:
    """Append to eight trajectories while the store is paused, then seal them."""
    episodes = [publisher.trajectory("g", sample, num_samples=8) for sample in range(8)]
    for episode in episodes:
        episode.append(ids("a"), ids("b")).result(10)
    client.client_pause(60_000, all=False)
    for number in range(2, num_turns + 1):
        for episode in episodes:
            episode.append(ids("a" * number), ids("b"))
    client.client_unpause()
    for episode in episodes:
        episode.seal(1.0)


def test_many_turns_become_few_writes_to_disk(forcing_store: Store) -> None:
    run = forcing_store.new_run()

    with Publisher(forcing_store.url, run) as publisher:
        append_side_by_side(forcing_store.client, publisher, num_turns=40)

    stored = forcing_store.read(run)
    assert stored.counts() == {"accepted": 8, "sealed": 8}
    assert [len(stored.spelled(key)) for key in stored.sealed()] == [40] * 8
    assert 0 < num_groups_of_writes(forcing_store.client) < 40


def test_full_store_takes_stored_seals_and_later_the_rest(forcing_store: Store) -> None:
    run = forcing_store.new_run()
    long = trajectory(turn("a" * 20_000, "B"))

    with Publisher(forcing_store.url, run) as publisher:
        publisher.publish(group("before", long)).result(10)
        with publisher.group("open", 20) as opened, ThreadPoolExecutor(20) as generators:
            used: Any = forcing_store.client.info("memory")
            forcing_store.client.config_set("maxmemory", used["used_memory"] + 300_000)
            ends = [
                generators.submit(write, opened.trajectory(sample), long) for sample in range(20)
            ]
            wait_until(lambda: publisher.statistics().num_retries > 50, describe="a full server")
            when_full = forcing_store.read(run).counts()
            forcing_store.client.config_set("maxmemory", 0)
            for end in ends:
                end.result(20)

    assert 0 < when_full["sealed"] < 21
    assert forcing_store.read(run).counts() == {"accepted": 21, "sealed": 21}


def write(writer: TrajectoryWriter, whole: Trajectory) -> None:
    (only,) = whole.turns
    writer.append(only.prompt_ids, only.response_ids, logprobs=only.logprobs)
    writer.seal(1.0)


def test_store_killed_between_writes_ends_with_every_turn_once(forcing_store: Store) -> None:
    run = forcing_store.new_run()

    with Publisher(forcing_store.url, run) as publisher:
        publisher.publish(group("first")).result(10)
        forcing_store.server.kill()
        receipts = [publisher.publish(group(f"g{number}")) for number in range(20)]
        forcing_store.server.restart()
        for receipt in receipts:
            receipt.result(20)

    stored = forcing_store.read(run)
    assert stored.counts() == {"accepted": 42, "sealed": 42}
    assert all(stored.spelled(key) == [("ab", "cd")] for key in stored.sealed())


def test_nothing_is_kept_for_a_store_that_syncs_before_it_answers(forcing_store: Store) -> None:
    run = forcing_store.new_run()

    with Publisher(forcing_store.url, run, keep_s=60.0) as publisher:
        publisher.publish(group("g")).result(10)
        publisher.flush_to_disk(20)
        statistics = publisher.statistics()

    assert statistics.kept_bytes == 0
