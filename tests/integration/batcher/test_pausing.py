"""A paused run: nothing new starts, open groups continue, waiting calls get the reason."""

import asyncio

import pytest

from testkit import group, wait_until_async
from turnstream.errors import NotReadyError, RunNotFoundError, WaitKind
from turnstream.generator import Publisher
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import pause_run, resume_run
from turnstream.store.waits.wait_reasons import reasons
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.bus.queries.run_snapshot import read_snapshot

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


@pytest.fixture
def client(house):
    with connect(house.url) as client:
        yield client


def publish_in_time(house, run, group_id, admission_timeout_s):
    with Publisher(house.url, run, admission_timeout_s=admission_timeout_s) as publisher:
        publisher.publish(group(group_id)).result(10)


async def test_new_group_waits_for_its_deadline_and_reports_the_pause(house, client):
    run = house.create_run(batch_groups=1)
    pause_run(client, run, "the judge is down")

    with pytest.raises(NotReadyError, match="the run is paused: the judge is down"):
        await asyncio.to_thread(publish_in_time, house, run, "g0", 0.3)


async def test_a_group_that_waits_begins_when_the_run_is_resumed(house, client):
    run = house.create_run(batch_groups=1)
    pause_run(client, run)
    waiting = asyncio.create_task(asyncio.to_thread(publish_in_time, house, run, "g0", 30))
    with pytest.raises(NotReadyError):
        await asyncio.to_thread(publish_in_time, house, run, "g1", 0.3)

    resume_run(client, run)
    await waiting

    assert read_frontier(client, run).num_opened_groups == 1


async def test_trainer_gets_planned_batches_and_then_the_pause(house, client):
    run = house.create_run(batch_groups=1, max_planned_ahead=0)
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()
    await house.publish(run, group("g0"), group("g1"))
    first = await trainer.get(1)

    pause_run(client, run, "maintenance")
    await trainer.stepped(first)
    again = await trainer.get(1)
    until = "maintenance, and no batch is planned until it is resumed"
    await trainer.refused(2, words=f"^step 2: the run is paused: {until}$")
    waiting = asyncio.create_task(trainer.get(2))
    resume_run(client, run)
    (second,) = await waiting

    assert again[0].header == first[0].header
    assert second.mini_batch.info.step == 2


async def test_a_group_that_is_open_is_finished_while_the_run_is_paused(house, client):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()

    def finish():
        with Publisher(house.url, run) as publisher, publisher.group("g0", 2) as members:
            members.trajectory(0).abandon("no").result(10)
            pause_run(client, run)
            with members.trajectory(1) as writer:
                writer.append([1, 2], [3])
                writer.seal(reward=1.0)

    await asyncio.to_thread(finish)
    frontier = read_frontier(client, run)
    resume_run(client, run)

    assert (frontier.paused, frontier.planned) == ("", 0)


async def test_no_plan_is_written_once_a_run_is_paused(house, client, caplog):
    # The leader has made and checked its plan when the pause comes.
    run = house.create_run(batch_groups=1)

    async def pause(manifest):
        pause_run(client, run)

    trainer = house.trainer(await house.start_batcher(before_write=pause), run)
    await trainer.start()
    await house.publish(run, group("g0"))

    async def is_paused():
        return read_frontier(client, run).paused is not None

    await wait_until_async(is_paused, describe="the pause")
    await trainer.refused(1, words="step 1: the run is paused")

    assert read_frontier(client, run).planned == 0
    assert "failed" not in caplog.text


async def test_why_names_the_pause_first(house, client):
    run = house.create_run(batch_groups=1)
    pause_run(client, run, "maintenance")

    first = reasons(read_snapshot(client, run))[0]

    assert first.kind is WaitKind.RUN_PAUSED
    assert first.facts == {"reason": "maintenance"}
    assert "the run is paused: maintenance" in first.sentence


async def test_pausing_and_resuming_again_changes_nothing(house, client):
    run = house.create_run(batch_groups=1)

    paused = [pause_run(client, run, reason) for reason in ("first", "second")]
    reason = read_frontier(client, run).paused
    resumed = [resume_run(client, run) for _ in range(2)]

    assert (paused, reason, resumed) == ([True, False], "first", [True, False])
    assert read_frontier(client, run).paused is None
    with pytest.raises(RunNotFoundError):
        pause_run(client, "nobody")
