"""Generators of a run that is deleted while the next run of its name is there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import redis

from harness.stored import content_of
from testkit import config, ids
from testkit.services.stores import Store
from turnstream.errors import FencedError, RunNotFoundError
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.run.runs import create_run
from turnstream.types import TrajectoryKey
from turnstream_server.ledger.admin.deletion import delete_run

pytestmark = pytest.mark.redis

REFUSALS = (RunNotFoundError, FencedError)
KEY = TrajectoryKey("g", 0)

_names = (f"shop {number}" for number in itertools.count(1))


@pytest.fixture
def name(store: Store) -> str:
    """The name of a run that is in the store."""
    name = next(_names)
    create_run(store.client, name, config(4))
    return name


def begin(trajectory: Any) -> None:
    trajectory.append(ids("ab"), ids("c")).result(10)


def replace_run(client: redis.Redis, name: str, *, number: int = 2) -> dict[str, Any]:
    """Delete the run and create the next, in which another writer has the same trajectory open.

    Returns:
        Everything that the store has of the new run.
    """
    delete_run(client, name)
    create_run(client, name, config(2))
    address = client.connection_pool.connection_kwargs
    url = f"redis://{address['host']}:{address['port']}/0"
    with Publisher(url, name, writer="w") as publisher:
        begin(publisher.trajectory("g", 0, num_samples=1))
    return content(client, f"{name}~{number}")


def content(client: redis.Redis, run: str) -> dict[str, Any]:
    """Everything that the store has of one run."""
    found: Any = client.scan_iter(match="ts:{*", count=1000)
    own = [key.decode() for key in found if keys.run_of(key.decode()) == run]
    return {key: content_of(client, key) for key in own}


CALLS: dict[str, Callable[[Publisher, Any], object]] = {
    "append": lambda _, open_: open_.append(ids("abcd"), ids("e")).result(10),
    "seal": lambda _, open_: open_.seal(1.0),
    "open": lambda publisher, _: begin(publisher.trajectory("h", 0, num_samples=1)),
    "reward": lambda publisher, _: publisher.post_reward(KEY, 1.0),
    "lapsed": lambda publisher, _: publisher.lapsed(),
    "adopt": lambda publisher, _: publisher.adopt("g", 0),
    "next_task": lambda publisher, _: publisher.next_task(5),
    "next_refill": lambda publisher, _: publisher.next_refill(5),
    "close_run": lambda publisher, _: publisher.close_run(),
    "abandon": lambda _, open_: open_.abandon("bored").result(10),
}


@pytest.mark.parametrize("call", CALLS)
def test_old_publisher_is_refused_and_writes_nothing_to_the_next_run(
    store: Store, name: str, call: str
) -> None:
    # Two runs of one name had the same keys, so that only a time in which the name was blocked kept
    # the writers of the first away from the second.
    with Publisher(store.url, name, writer="w") as publisher:
        trajectory = publisher.trajectory("g", 0, num_samples=1)
        begin(trajectory)
        before = replace_run(store.client, name)

        refusals: list[str] = []
        try:
            CALLS[call](publisher, trajectory)
        except REFUSALS as error:
            refusals.append(str(error))

        assert refusals or call == "abandon"  # nothing is sent for a trajectory that has failed
        assert all("deleted" in each or "was never opened" in each for each in refusals)
        assert content(store.client, f"{name}~2") == before


def test_old_publisher_is_refused_after_its_tombstones_have_expired(
    store: Store, name: str
) -> None:
    # A writer that slept for longer than the tombstones stood wrote its turn to the next run, and
    # sealed a trajectory there that another writer had opened.
    with Publisher(store.url, name, writer="w") as publisher:
        trajectory = publisher.trajectory("g", 0, num_samples=1)
        begin(trajectory)
        before = replace_run(store.client, name)
        for key in content(store.client, name):
            if key != keys.incarnation_key(name):
                store.client.delete(key)

        with pytest.raises(REFUSALS):
            trajectory.append(ids("abcd"), ids("e")).result(10)
        with pytest.raises(REFUSALS):
            trajectory.seal(1.0)

    assert content(store.client, f"{name}~2") == before
    assert content(store.client, name).keys() == {keys.incarnation_key(name)}


def test_publisher_that_first_writes_after_a_deletion_writes_to_the_next_run(
    store: Store, name: str
) -> None:
    with Publisher(store.url, name, writer="first") as publisher:
        delete_run(store.client, name)
        create_run(store.client, name, config(4))
        with publisher.group("g", 2) as group:
            for sample in range(2):
                begin(group.trajectory(sample))
                group.trajectory(sample).seal(1.0)

    counts: Any = store.client.hgetall(keys.run_keys(f"{name}~2").counts)
    assert counts[b"sealed"] == b"2"
    assert not store.client.exists(keys.run_keys(name).ledger)


def test_publisher_reads_the_id_of_its_run_once(store: Store, name: str) -> None:
    def num_gets() -> int:
        found: Any = store.client.info("commandstats")
        return found.get("cmdstat_get", {"calls": 0})["calls"]

    before = num_gets()
    with Publisher(store.url, name) as publisher:
        trajectory = publisher.trajectory("g", 0, num_samples=1)
        begin(trajectory)
        at_first = num_gets()
        for number in range(20):
            trajectory.append(ids("abcd") + ids("x") * number, ids("e")).result(10)
        publisher.lapsed()
        trajectory.seal(1.0)

    assert at_first - before == 1
    assert num_gets() == at_first
