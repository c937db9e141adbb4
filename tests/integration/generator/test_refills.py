"""Refills and late rewards, as generators see them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

from testkit import group, trajectory, turn, wait_until
from turnstream.errors import ConflictError, InvalidTurnError, NotReadyError
from turnstream.generator import AsyncPublisher, Publisher, RewardOutcome, post_reward
from turnstream.store.client import keys
from turnstream.store.run.credits import credit
from turnstream.types import GroupOpened, RewardPosted, SealedTrajectory, TrajectoryKey
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

NewRun = Callable[..., str]
Read = Callable[[redis.Redis, str], Any]
AGAIN = TrajectoryKey("g", 1, 1)


def grant(client: redis.Redis, run: str) -> None:
    """Grant a refill of sample 1 of group "g", as the planner does."""
    names = keys.run_keys(run)
    client.hset(names.members, "g", "2:1:1:the prompt")
    client.zadd(names.refills, {AGAIN.trajectory_id: 1})
    client.xadd(names.wake, {"w": ""}, maxlen=1, approximate=False)


def grant_to_who_waits(client: redis.Redis, run: str) -> None:
    """The same, once somebody waits for it."""
    are_waiting(client, 1)
    grant(client, run)


def are_waiting(client: redis.Redis, number: int) -> None:
    """Wait until so many read what is not there yet."""
    wait_until(lambda: num_blocked(client) == number, describe=f"{number} who wait")


def num_blocked(client: redis.Redis) -> int:
    clients: Any = client.info("clients")
    return clients["blocked_clients"]


def open_group(publisher: Publisher) -> None:
    with publisher.trajectory("g", 0, num_samples=3, num_needed=2, prompt_uid="the prompt") as it:
        it.append([1], [2])
        it.seal(reward=1.0)


def test_a_group_says_how_many_of_its_samples_it_needs(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with Publisher(server.url, run) as publisher:
        open_group(publisher)
        with publisher.group("h", 3, num_needed=1):
            pass
        with (
            pytest.raises(ConflictError, match="was opened to need 2 of its samples, not 3"),
            publisher.trajectory("g", 1, num_samples=3),
        ):
            pass

    opened = [event for event in read(client, run).events() if isinstance(event, GroupOpened)]
    assert [(each.num_samples, each.num_needed) for each in opened] == [(3, 2), (3, 1)]


def test_a_refill_is_waited_for_and_written_like_any_trajectory(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    with Publisher(server.url, run) as publisher:
        open_group(publisher)
        granting = threading.Thread(target=grant_to_who_waits, args=(client, run), daemon=True)
        granting.start()
        refill = publisher.next_refill(30)
        with publisher.refill_trajectory(refill) as writer:
            writer.append([1], [3])
            writer.seal(reward=0.0)
        granting.join()

    assert (refill.key, refill.prompt_uid) == (AGAIN, "the prompt")
    assert (refill.num_samples, refill.num_needed) == (3, 2)
    assert read(client, run).sealed() == [TrajectoryKey("g", 0), AGAIN]


async def test_one_of_many_waiting_generators_gets_a_refill(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(client)
    with Publisher(server.url, run) as publisher:
        open_group(publisher)

    async with AsyncPublisher(server.url, run) as one, AsyncPublisher(server.url, run) as other:
        waiting = {asyncio.ensure_future(each.next_refill(30)) for each in (one, other)}
        await asyncio.to_thread(are_waiting, client, 2)
        grant(client, run)
        given, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(are_waiting, client, len(left))  # after it was woken, too
        (refill,) = [each.result() for each in given]
        for each in left:
            each.cancel()

    assert refill.key == AGAIN
    assert (len(given), len(left)) == (1, 1)


async def test_one_of_many_tasks_of_a_publisher_gets_a_refill(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun
) -> None:
    # The store gives an attempt again to the writer that has it. Tasks that had all read of it
    # before the first of them opened it were all given it, and wrote one trajectory together.
    run = new_run(client)
    with Publisher(server.url, run) as publisher:
        open_group(publisher)
    grant(client, run)

    async with AsyncPublisher(server.url, run) as publisher:
        waiting = [publisher.next_refill(0.2) for _ in range(8)]
        results = await asyncio.gather(*waiting, return_exceptions=True)

    names = [type(result).__name__ for result in results]
    assert sorted(names) == [*["NotReadyError"] * 7, "Refill"]


def test_new_group_passes_a_waiting_refill_and_takes_none_of_its_bytes(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(client, batch_groups=1, max_staleness=1, max_planned_ahead=0)

    with Publisher(server.url, run) as publisher:
        open_group(publisher)
        grant(client, run)
        with publisher.group("the last that has room", 1):
            num_left = credit(client, run).num_groups
            refill = publisher.next_refill(5)

    assert num_left == 0
    assert refill.key == AGAIN


def test_missing_refill_is_reported_by_the_deadline(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(client)

    with (
        Publisher(server.url, run) as publisher,
        pytest.raises(NotReadyError, match="no sample was to be tried again within"),
    ):
        publisher.next_refill(0.01)


def test_reward_is_posted_after_the_seal_by_another_process(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run, key = new_run(client), TrajectoryKey("g", 0)

    with Publisher(server.url, run) as publisher:
        with publisher.trajectory("g", 0, num_samples=1) as writer:
            writer.append([1], [2])
            writer.seal(reward_components={"format": 1.0}, awaits_reward=True)
        states = read(client, run).states()
        first = post_reward(client, run, key, reward_components={"accuracy": 0.5})
        again = publisher.post_reward(key, reward_components={"accuracy": 0.5})
        with pytest.raises(ConflictError, match="another reward was posted"):
            publisher.post_reward(key, reward_components={"accuracy": 0.75})

    assert states == {"g/0/0": "awaiting_reward"}
    assert (first, again) == (RewardOutcome.POSTED, RewardOutcome.DUPLICATE)
    *_, seal, posted = read(client, run).events()
    assert isinstance(seal, SealedTrajectory)
    assert seal.awaits_reward
    assert posted == RewardPosted(key=key, reward_components={"accuracy": 0.5})
    assert read(client, run).counts() == {"accepted": 1, "sealed": 1}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "reward"),
        ({"reward": float("nan")}, "reward"),
        ({"reward_components": {"a": "much"}}, r"reward_components\['a'\]"),
    ],
)
def test_a_reward_that_is_no_number_is_refused_before_it_is_sent(
    client: redis.Redis, new_run: NewRun, given: dict[str, Any], field: str
) -> None:
    run = new_run(client)

    with pytest.raises(InvalidTurnError, match=f"^{field}: "):
        post_reward(client, run, TrajectoryKey("g", 0), **given)


def test_a_whole_group_may_be_published_before_its_rewards(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)
    members = [
        replace(trajectory(turn("a", "B"), sample=sample, reward=None), awaits_reward=True)
        for sample in (0, 1)
    ]

    with Publisher(server.url, run) as publisher:
        publisher.publish(group("g", *members)).result(10)

    assert read(client, run).counts() == {"accepted": 2, "awaiting_reward": 2}
