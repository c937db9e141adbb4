"""Release keeps up with planning: its pauses are bounded, and so is its backlog."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from testkit import group, trajectory, wait_until_async
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream_server.batcher.planner import releaser
from turnstream_server.batcher.planner.upkeep import Upkeep
from turnstream_server.bus.queries.budget import read_held_async

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

        async def found() -> bool:
            return until in self._later_s

        await wait_until_async(found, 60.0, describe=f"the next {until}")
        return self._later_s[until] - self.done_s


async def train(trainer: Any, steps: range) -> None:
    for step in steps:
        await trainer.committed(await trainer.stepped(await trainer.get(step)))


async def num_kept_groups(client: Any, run: str) -> int:
    """Return the groups of two whose bytes are still counted."""
    return await client.hlen(keys.run_keys(run).held) // 2


async def test_release_rests_less_than_it_works(house):
    # The pause was nine times as long as the round before it: a round of a second was followed by
    # nine seconds in which nothing was released, and the next round took longer.
    slow = SlowAct("release_payload")
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(upkeep=Upkeep(before=slow.before)), run)
    await house.publish(run, *(group(f"g{number}") for number in range(2)))
    await trainer.start()

    await train(trainer, range(1, 3))
    rest_s = await slow.rest_s(until="advance_watermark")

    assert rest_s < WORK_S


async def test_rounds_follow_at_once_while_released_steps_are_left(house, monkeypatch):
    # With a pause after each round, a round of bounded size would bound the rate of release, too:
    # a leader that starts with a backlog would never catch up.
    monkeypatch.setattr(releaser, "SHORTEST_PAUSE_S", 1_000.0)
    monkeypatch.setattr(releaser, "ROUND_SLICE", 1)
    are_committed = asyncio.Event()

    async def wait_for_commits(_: str) -> None:
        await are_committed.wait()

    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(upkeep=Upkeep(before=wait_for_commits)), run)
    await house.publish(run, *(group(f"g{number}") for number in range(6)))
    await trainer.start()
    await train(trainer, range(1, 7))
    are_committed.set()

    async with connect_async(house.url) as client:

        async def is_released() -> bool:
            return await num_kept_groups(client, run) == 1

        await wait_until_async(is_released, 60.0, describe="the release of five steps")


async def test_release_of_filtered_groups_rests_less_than_it_works(house):
    # The same pause followed the deletion of filtered payload, whose bytes count in the budget.
    slow = SlowAct("release_payload")
    run = house.create_run(batch_groups=100, drop_zero_variance=True)
    await house.start_batcher(upkeep=Upkeep(before=slow.before))

    await house.publish(run, *(group(f"kept{number}") for number in range(20)))
    await house.publish(run, group("first", *EQUAL))
    await slow.begun.wait()
    await house.publish(run, group("second", *EQUAL))
    rest_s = await slow.rest_s(until="release_payload")

    assert rest_s < WORK_S


async def test_search_that_finds_many_does_not_wait_for_its_rest(house, monkeypatch):
    # Nine times the duration of a search is no bound where each search takes longer than the last.
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


async def test_backlog_stays_bounded_while_steps_are_committed(house):
    # Pauses of nine times the last round grew with the backlog, and the backlog with them: above
    # 500 trajectories per second the payload of trained steps stayed in the store.
    num_steps = 300
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, *(group(f"g{number}") for number in range(num_steps)))
    await trainer.start()

    lags = []
    async with connect_async(house.url) as client:
        for step in range(1, num_steps + 1):
            await train(trainer, range(step, step + 1))
            lags.append(await num_kept_groups(client, run) - (num_steps - step) - 1)

    assert max(lags) < num_steps / 4


async def test_byte_budget_keeps_most_of_the_throughput(house):
    # Publishers waited for bytes that only a release returns: 77 trajectories per second passed
    # with a budget, 2,400 without, and the trained steps held more than the budget.
    budget = 600_000

    free_s, _ = await stream_and_train(house)
    with_budget_s, held = await stream_and_train(house, max_bytes=budget)

    assert with_budget_s < 3 * free_s
    assert max(held) < 1.5 * budget


async def stream_and_train(house: Any, **fields: Any) -> tuple[float, list[int]]:
    """Return the time in which a run is trained while it is published, and the bytes held."""
    loop, num_steps = asyncio.get_running_loop(), 100
    run = house.create_run(batch_groups=4, max_staleness=8, **fields)
    trainer = house.trainer(await house.start_batcher(), run)
    groups = [group(f"g{number}") for number in range(4 * num_steps)]

    def publish() -> None:
        with Publisher(house.url, run) as publisher:
            for each in groups:
                publisher.publish(each)

    await trainer.start()
    held: list[int] = []
    started_s = loop.time()
    publishing = asyncio.create_task(asyncio.to_thread(publish))
    async with connect_async(house.url) as client:
        for step in range(1, num_steps + 1):
            await train(trainer, range(step, step + 1))
            held.append((await read_held_async(client, run)).total)
    await publishing
    return loop.time() - started_s, held
