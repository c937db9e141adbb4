"""Refills and late rewards, as generators see them."""

from __future__ import annotations

import asyncio
import threading

import pytest
import redis

from testkit.services.stores import Store
from turnstream.errors import ConflictError
from turnstream.generator import AsyncPublisher, Publisher, RewardOutcome, post_reward
from turnstream.store.client import keys
from turnstream.store.run.credits import credit
from turnstream.types import GroupOpened, RewardPosted, SealedTrajectory, TrajectoryKey

pytestmark = pytest.mark.redis

AGAIN = TrajectoryKey("g", 1, 1)


def grant(client: redis.Redis, run: str) -> None:
    """Grant a refill of sample 1 of group "g", as the planner does."""
    names = keys.run_keys(run)
    client.hset(names.members, "g", "2:1:1:the prompt")
    client.zadd(names.refills, {AGAIN.trajectory_id: 1})
    client.xadd(names.wake, {"w": ""}, maxlen=1, approximate=False)


def grant_when_awaited(store: Store, run: str) -> None:
    """Grant the refill once a generator waits for it."""
    store.wait_for_blocked(1)
    grant(store.client, run)


def open_group(publisher: Publisher) -> None:
    with publisher.trajectory("g", 0, num_samples=3, num_needed=2, prompt_uid="the prompt") as it:
        it.append([1], [2])
        it.seal(reward=1.0)


def test_a_group_says_how_many_of_its_samples_it_needs(store: Store) -> None:
    run = store.new_run()

    with Publisher(store.url, run) as publisher:
        open_group(publisher)
        with publisher.group("h", 3, num_needed=1):
            pass
        with (
            pytest.raises(ConflictError, match="was opened to need 2 of its samples, not 3"),
            publisher.trajectory("g", 1, num_samples=3),
        ):
            pass

    opened = [event for event in store.read(run).events() if isinstance(event, GroupOpened)]
    assert [(each.num_samples, each.num_needed) for each in opened] == [(3, 2), (3, 1)]


def test_a_refill_is_waited_for_and_written_like_any_trajectory(store: Store) -> None:
    run = store.new_run()

    with Publisher(store.url, run) as publisher:
        open_group(publisher)
        granting = threading.Thread(target=grant_when_awaited, args=(store, run), daemon=True)
        granting.start()
        refill = publisher.next_refill(30)
        with publisher.refill_trajectory(refill) as writer:
            writer.append([1], [3])
            writer.seal(reward=0.0)
        granting.join()

    assert (refill.key, refill.group.prompt_uid) == (AGAIN, "the prompt")
    assert (refill.group.num_samples, refill.group.num_needed) == (3, 2)
    assert store.read(run).sealed() == [TrajectoryKey("g", 0), AGAIN]


async def test_one_of_many_tasks_of_a_publisher_gets_a_refill(store: Store) -> None:
    # The store gives an attempt again to the writer that has it. Tasks that had all read of it
    # before the first of them opened it were all given it, and wrote one trajectory together.
    run = store.new_run()
    with Publisher(store.url, run) as publisher:
        open_group(publisher)
    grant(store.client, run)

    async with AsyncPublisher(store.url, run) as publisher:
        waiting = [publisher.next_refill(0.2) for _ in range(8)]
        results = await asyncio.gather(*waiting, return_exceptions=True)

    names = [type(result).__name__ for result in results]
    assert sorted(names) == [*["NotReadyError"] * 7, "Refill"]


def test_new_group_passes_a_waiting_refill_and_takes_none_of_its_bytes(store: Store) -> None:
    run = store.new_run(batch_groups=1, max_staleness=1, max_planned_ahead=0)

    with Publisher(store.url, run) as publisher:
        open_group(publisher)
        grant(store.client, run)
        with publisher.group("last", 1):
            num_left = credit(store.client, run).num_groups
            refill = publisher.next_refill(5)

    assert num_left == 0
    assert refill.key == AGAIN


def test_reward_is_posted_after_the_seal_by_another_process(store: Store) -> None:
    run, key = store.new_run(), TrajectoryKey("g", 0)

    with Publisher(store.url, run) as publisher:
        with publisher.trajectory("g", 0, num_samples=1) as writer:
            writer.append([1], [2])
            writer.seal(reward_components={"format": 1.0}, awaits_reward=True)
        states = store.read(run).states()
        first = post_reward(store.client, run, key, reward_components={"accuracy": 0.5})
        again = publisher.post_reward(key, reward_components={"accuracy": 0.5})
        with pytest.raises(ConflictError, match="another reward was posted"):
            publisher.post_reward(key, reward_components={"accuracy": 0.75})

    assert states == {"g/0/0": "awaiting_reward"}
    assert (first, again) == (RewardOutcome.POSTED, RewardOutcome.DUPLICATE)
    *_, seal, posted = store.read(run).events()
    assert isinstance(seal, SealedTrajectory)
    assert seal.awaits_reward
    assert posted == RewardPosted(key=key, reward_components={"accuracy": 0.5})
    assert store.read(run).counts() == {"accepted": 1, "sealed": 1}
