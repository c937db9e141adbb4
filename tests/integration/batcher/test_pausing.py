"""A paused run: nothing new starts, open groups continue, waiting calls get the reason."""

import asyncio

import pytest

from testkit import group, wait_until_async
from turnstream.errors import NotReadyError
from turnstream.generator import Publisher
from turnstream.store.run.runs import pause_run, resume_run
from turnstream_server.bus.core.frontier import read_frontier

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


@pytest.fixture
def client(house):
    return house.client


def publish_in_time(house, run, group_id, admission_timeout_s):
    with Publisher(house.url, run, admission_timeout_s=admission_timeout_s) as publisher:
        publisher.publish(group(group_id)).result(10)


async def test_new_group_waits_for_its_deadline_and_reports_the_pause(house, client):
    run = house.create_run(batch_groups=1)
    pause_run(client, run, "the judge is down")

    with pytest.raises(NotReadyError, match="the run is paused: the judge is down"):
        await asyncio.to_thread(publish_in_time, house, run, "g0", 0.3)


async def test_trainer_gets_planned_batches_and_then_the_pause(house, client):
    run, trainer = await house.serve(batch_groups=1, max_planned_ahead=0)
    await trainer.start()
    await house.publish(run, group("g0"), group("g1"))
    first = await trainer.get(1)

    pause_run(client, run, "maintenance")
    await trainer.stepped(first)
    again = await trainer.get(1)
    await trainer.refused(2, words="^step 2: .*; the run is paused: maintenance")
    waiting = asyncio.create_task(trainer.get(2))
    resume_run(client, run)
    (second,) = await waiting

    assert again[0].header == first[0].header
    assert second.mini_batch.info.step == 2


async def test_no_plan_is_written_once_a_run_is_paused(house, client, caplog):
    run = house.create_run(batch_groups=1)

    async def pause(manifest):
        pause_run(client, run)

    trainer = await house.start_trainer(run, before_write=pause)
    await house.publish(run, group("g0"))

    await wait_until_async(
        lambda: read_frontier(client, run).paused is not None, describe="the pause"
    )
    await trainer.refused(1, words="the run is paused")

    assert read_frontier(client, run).planned == 0
    assert "failed" not in caplog.text
