"""Release keeps up with planning: its pauses are bounded, and so is its backlog."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from testkit import group, trajectory, wait_until_async
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream_server.batcher.planner import releaser

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

EQUAL = (trajectory(sample=0), trajectory(sample=1))
WORK_S = 1.5


class SlowAct:
    """Makes the first act of a kind take WORK_S, and records when each act begins after it."""

    def __init__(self, act: str) -> None:
        self.done_s = 0.0
        self.begun = asyncio.Event()
        self._act = act
        self._later_s: dict[str, float] = {}

    async def before(self, act: str) -> None:
        """Wait before the first act of the kind."""
        loop = asyncio.get_running_loop()
        if self.done_s:
            self._later_s.setdefault(act, loop.time())
        elif act == self._act:
            self.begun.set()
            await asyncio.sleep(WORK_S)
            self.done_s = loop.time()

    async def rest_s(self, *, until: str) -> float:
        """Return the seconds from the end of the slow act to the next act of another kind."""
        await wait_until_async(lambda: until in self._later_s, 60.0, describe=f"the next {until}")
        return self._later_s[until] - self.done_s


async def train(trainer: Any, steps: range) -> None:
    for step in steps:
        await trainer.committed(await trainer.stepped(await trainer.get(step)))


async def num_kept_groups(client: Any, run: str) -> int:
    """Return the groups of two whose bytes are still counted."""
    return await client.hlen(keys.run_keys(run).held) // 2


async def test_release_rests_less_than_it_works(house):
    slow = SlowAct("release_payload")
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(before_act=slow.before), run)
    await house.publish(run, *(group(f"g{number}") for number in range(2)))
    await trainer.start()

    await train(trainer, range(1, 3))
    rest_s = await slow.rest_s(until="advance_watermark")

    assert rest_s < WORK_S


async def test_rounds_follow_at_once_while_released_steps_are_left(house, monkeypatch):
    monkeypatch.setattr(releaser, "SHORTEST_PAUSE_S", 1_000.0)
    monkeypatch.setattr(releaser, "ROUND_SLICE", 1)
    are_committed = asyncio.Event()

    async def wait_for_commits(_: str) -> None:
        await are_committed.wait()

    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(before_act=wait_for_commits), run)
    await house.publish(run, *(group(f"g{number}") for number in range(6)))
    await trainer.start()
    await train(trainer, range(1, 7))
    are_committed.set()

    async with connect_async(house.url) as client:

        async def is_released() -> bool:
            return await num_kept_groups(client, run) == 1

        await wait_until_async(is_released, 60.0, describe="the release of five steps")


async def test_search_that_finds_many_does_not_wait_for_its_rest(house, monkeypatch):
    searched_s, find_ended = [], releaser.find_ended

    async def find_slowly(*args: Any, **options: Any) -> Any:
        await asyncio.sleep(WORK_S)
        searched_s.append(asyncio.get_running_loop().time())
        return await find_ended(*args, **options)

    monkeypatch.setattr(releaser, "find_ended", find_slowly)
    run = house.create_run(batch_groups=1, drop_zero_variance=True)
    await house.start_batcher()

    async def has_searched(times: int) -> bool:
        return len(searched_s) >= times

    await house.publish(run, group("first", *EQUAL))
    await wait_until_async(lambda: has_searched(1), 60.0, describe="the first search")
    await house.publish(run, *(group(f"g{number}", *EQUAL) for number in range(5)))
    await wait_until_async(lambda: has_searched(2), 60.0, describe="the second search")

    assert searched_s[1] - searched_s[0] < 5 * WORK_S
