import asyncio

import pytest

from testkit import group
from turnstream.errors import EndOfRunError
from turnstream.generator import Publisher

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


async def test_a_closed_run_ends_with_a_short_batch_and_then_an_end(house):
    _, trainer = await house.started(
        *(group(f"g{i}") for i in range(3)), closes=True, batch_groups=2
    )

    sizes = []
    for step in (1, 2):
        (pulled,) = await trainer.get(step)
        sizes.append(len(pulled.rows))
        await trainer.stepped([pulled])

    assert sizes == [4, 2]
    with pytest.raises(EndOfRunError):
        await trainer.get(3)


async def test_end_of_run_is_reported_once_the_last_batch_is_stepped(house):
    _, trainer = await house.started(group("g0"), closes=True, batch_groups=1)
    last = await trainer.get(1)

    waiting = asyncio.create_task(trainer.get(2))
    # Calls of one connection arrive in order.
    await trainer.refused(2, words="^step 2: 1 steps are planned, 0 are stepped; ")
    await trainer.stepped(last)

    with pytest.raises(EndOfRunError):
        await waiting


async def test_a_closed_run_does_not_end_while_a_group_is_open(house):
    run, trainer = await house.serve(batch_groups=2)
    await trainer.start()

    with Publisher(house.url, run) as publisher, publisher.group("late", 2) as members:
        await house.publish(run, group("g0"), closes=True)
        await trainer.refused(1, words="1 of 2 groups ready, 1 open$")
        for sample in range(2):
            with members.trajectory(sample) as writer:
                writer.append([1, 2], [3])
                writer.seal(reward=float(sample))
    (pulled,) = await trainer.get(1)

    assert pulled.mini_batch.rows.group_id == ["g0", "g0", "late", "late"]


async def test_batcher_started_after_the_end_serves_a_call_for_the_run(house):
    run = house.create_run(batch_groups=1)
    replica = await house.start_batcher()
    first = house.trainer(replica, run)
    await house.publish(run, group("g0"), closes=True)
    await first.start("first")
    before = await first.get(1)
    await first.stepped(before)
    with pytest.raises(EndOfRunError):
        await first.get(2)
    await replica.stop()

    second = await house.start_trainer(run, session="second")
    after = await second.get(1)

    assert after[0].header == before[0].header
