"""A reward per turn from publishers to the advantages of a worker, on a real store and batcher."""

from __future__ import annotations

from typing import Any

import pytest
import redis

import testkit
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.worker import BatchStream

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

REWARDS = [[0.5, -0.25], [1.0, 0.5]]
"""Rewards of the turns, a list for each trajectory."""


async def publish(url: str, run: str) -> None:
    """A trajectory by each publisher; the seals have no reward."""
    letters = testkit.ids
    first, second = (letters("ab"), letters("cd")), (letters("abcde"), letters("fg"))
    with Publisher(url, run) as publisher, publisher.trajectory("g", 0, num_samples=2) as one:
        for turn, reward in zip((first, second), REWARDS[0], strict=True):
            one.append(*turn, reward=reward)
        one.seal()
    async with AsyncPublisher(url, run) as other:
        two = other.trajectory("g", 1, num_samples=2)
        for turn, reward in zip((first, second), REWARDS[1], strict=True):
            await two.append(*turn, reward=reward)
        await two.seal()


@pytest.mark.parametrize(
    ("source", "expected"), [("sum_of_turns", [0.25, 1.5]), ("last_turn", [-0.25, 0.5])]
)
async def test_rewards_of_turns_are_those_of_the_trajectory(
    server: Any,
    client: redis.Redis,
    start_batcher: Any,
    new_run: Any,
    source: str,
    expected: list[float],
) -> None:
    run = new_run(client, batch_groups=1, reward_source=source, estimator="dr_grpo")
    await publish(server.url, run)

    with BatchStream(start_batcher().target, run) as stream:
        rows = next(stream).rows

    mean = sum(expected) / 2
    assert rows.reward.tolist() == expected
    assert rows.advantage.tolist() == [reward - mean for reward in expected]
    assert [own.tolist() for own in rows.rewards] == [
        [0, first, 0, 0, second] for first, second in REWARDS
    ]
