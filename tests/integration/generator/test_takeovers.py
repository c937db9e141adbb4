"""Taking over what another generator left open: its turns, its seal, its names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from testkit import ids
from testkit.stores import Store
from turnstream.errors import ConflictError, FencedError
from turnstream.generator import Publisher
from turnstream.generator.api.work import adopt_trajectory
from turnstream.generator.transport.transport import BoundedCalls, RedisRequests
from turnstream.store.client import keys
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.types import TrajectoryKey

pytestmark = pytest.mark.redis

LEASE_S = 0.5
KEY = TrajectoryKey("g", 0)


@pytest.mark.parametrize(
    ("fields", "state"),
    [({"reward": 1.0}, "sealed"), ({"awaits_reward": True}, "awaiting_reward")],
)
def test_stored_seal_without_an_event_counts(
    store: Store, fields: dict[str, Any], state: str
) -> None:
    run = store.new_run(lease_s=LEASE_S)
    with Publisher(store.url, run) as gone:
        gone.trajectory("h", 0, num_samples=1).append(ids("ab"), ids("c")).result(10)
        episode = gone.trajectory("g", 0, num_samples=1)
        episode.append(ids("ab"), ids("c"))
        episode.seal(**fields)
    forget_the_seal(store.client, run, state=state)

    with (
        Publisher(store.url, run, writer="second") as publisher,
        pytest.raises(ConflictError, match="g/0/0 is sealed: its writer stored the seal"),
    ):
        publisher.adopt("g", 0)

    stored = store.read(run)
    assert stored.ledger()["g/0/0"] == f"{state}:2"
    assert stored.sealed() == [KEY, KEY]
    assert stored.counts() == {"accepted": 2, "open": 1, state: 1}


def forget_the_seal(
    client: redis.Redis, run: str, *, epoch: int = 1, state: str = "sealed"
) -> None:
    """As if the writer of g/0/0 had died before it told the run."""
    names = keys.run_keys(run)
    client.hset(names.ledger, "g/0/0", f"open:{epoch}:gone")
    client.hincrby(names.counts, state, -1)
    client.hincrby(names.counts, "open", 1)
    client.zadd(names.leases, {"g/0/0": 1})


class Sleepy(redis.asyncio.Redis):
    """Sleeps before a command, while another writer does something."""

    slept: tuple[str, Callable[[], None]]

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """The reply."""
        if args[0] == self.slept[0]:
            await asyncio.to_thread(self.slept[1])
        return await super().execute_command(*args, **options)


@pytest.fixture
def left_open(store: Store) -> str:
    """A run in which g/0/0 has one turn, and its lease has ended."""
    run = store.new_run()
    with Publisher(store.url, run) as gone:
        gone.trajectory("g", 0, num_samples=1).append(ids("ab"), ids("c")).result(10)
    store.client.zadd(keys.run_keys(run).leases, {"g/0/0": 1})
    return run


@pytest.fixture
def another_seals(store: Store, left_open: str) -> Callable[[], None]:
    """A third writer takes g/0/0 over, and seals it."""

    def seal() -> None:
        store.client.zadd(keys.run_keys(left_open).leases, {"g/0/0": 1})
        with Publisher(store.url, left_open, writer="third") as third:
            third.adopt("g", 0).seal(1.0)

    return seal


@pytest.mark.parametrize("command", ["XRANGE", "HMGET"])
async def test_sleeper_gets_an_error_after_another_adopted_and_sealed(
    store: Store, left_open: str, another_seals: Callable[[], None], command: str
) -> None:
    # The seal of the third writer came between what the second read of the payload: it was taken
    # for a turn, and the payload for damaged.
    sleepy: Any = Sleepy.from_url(store.url)
    sleepy.slept = command, another_seals
    calls = BoundedCalls(RedisRequests(sleepy), StoreWait("store", None, "not adopted", wait_s=10))
    with pytest.raises(FencedError, match="epoch 2, and is by now that of epoch 3"):
        await adopt_trajectory(calls, left_open, writer="second", key=KEY)
    await sleepy.aclose()
