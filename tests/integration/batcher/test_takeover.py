import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from testkit import group, trajectory, turn, wait_until_async
from turnstream.store.client import keys
from turnstream.store.run.configs import read_revisions, revise_config
from turnstream_server.batcher.planner.chain import PAGE_MANIFESTS
from turnstream_server.bus.core.scan import PAGE_EVENTS

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

LEASE_S = 0.6

# A batcher that writes down the plan it has checked and signals itself before it writes it.
DOOMED = """
import asyncio, os, signal, sys
from turnstream_server.batcher.serving.service import BatcherOptions
from turnstream_server.batcher.serving.service import serving
from turnstream_server.batcher.assembly.assembler import Assembler

url, lease_s, number = sys.argv[1:]

check = Assembler.check

async def check_and_fall(self, batch):
    await check(self, batch)
    print(batch.manifest_hash, flush=True)
    os.kill(os.getpid(), int(number))

Assembler.check = check_and_fall

async def main():
    options = BatcherOptions(redis_url=url, leader_lease_s=float(lease_s))
    async with serving(options) as address:
        print(address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def start_doomed(house, start_process) -> Callable[[signal.Signals], Any]:
    """Starts a batcher process that a signal hits between the check of a plan and its writing.

    It prints its address, and then the hash of the plan that it has checked.
    """
    return lambda number: start_process(DOOMED, house.url, str(LEASE_S), str(int(number)))


async def test_successor_of_a_planner_killed_after_a_revision_plans_by_it(house, start_doomed):
    run = house.create_run(batch_groups=1)
    doomed = start_doomed(signal.SIGKILL)
    await doomed.line()
    before = read_revisions(house.client, run).last.config
    after = replace(before, batch_groups=2, mini_batch_groups=1, estimator="rloo")
    revise_config(house.client, run, after, from_step=1)
    await house.publish(run, *(group(f"g{i}") for i in range(3)))
    plan = await doomed.line()
    assert await asyncio.to_thread(doomed.wait, 60) == -signal.SIGKILL

    successor = await house.start_trainer(run, lease_s=LEASE_S)
    pulled = await successor.get(1)

    assert [each.mini_batch.info.manifest_hash for each in pulled] == [plan, plan]
    assert pulled[0].mini_batch.info.config_revision == 2


@pytest.mark.parametrize(("policy", "version", "chosen"), [("drop", 0, "new"), ("keep", 2, "old")])
async def test_successor_of_a_planner_killed_after_a_choice_keeps_the_choice(
    house, start_doomed, policy, version, chosen
):
    run = house.create_run(
        batch_groups=1, max_staleness=2, max_age_policy=policy, selection="oldest_weights"
    )
    first = await house.start_batcher(lease_s=LEASE_S)
    trainer = house.trainer(first, run)
    await trainer.start()
    await trainer.announce_version(0, step=0)
    for step in (1, 2, 3):
        await house.publish(run, _of_version(f"g{step}", step - 1))
        await trainer.stepped(await trainer.get(step))
        await trainer.announce_version(step, step=step)
    await first.stop()
    doomed = start_doomed(signal.SIGKILL)
    await doomed.line()
    await house.publish(run, _of_version("old", version), _of_version("new", 3))
    plan = await doomed.line()
    assert await asyncio.to_thread(doomed.wait, 60) == -signal.SIGKILL
    await house.publish(run, _of_version("after", 1))

    successor = house.trainer(await house.start_batcher(lease_s=LEASE_S), run)
    successor.session_epoch = trainer.session_epoch
    (fourth,) = await successor.get(4)
    house.delete_run(run)  # batchers of other tests must not plan the rest

    assert fourth.mini_batch.info.manifest_hash == plan
    assert set(fourth.mini_batch.rows.group_id) == {chosen}


def _of_version(name, version):
    members = [
        trajectory(turn("ab", "CD", version=version), sample=sample, reward=float(sample))
        for sample in range(2)
    ]
    return group(name, *members)


async def test_a_planner_that_stops_cleanly_leaves_no_lease_behind(house):
    run = house.create_run(batch_groups=1)
    first = await house.start_batcher(lease_s=600)
    await house.publish(run, group("g0"))
    await _wait_for_plans(house, run, 1)

    await first.stop()
    second = await house.start_trainer(run, lease_s=600)
    await second.stepped(await second.get(1))
    await house.publish(run, group("g1"))
    (pulled,) = await second.get(2)

    assert pulled.mini_batch.rows.group_id == ["g1", "g1"]


async def test_a_plan_of_several_pages_is_taken_over_whole(house):
    num_steps = PAGE_MANIFESTS + 2
    run = house.create_run(batch_groups=1, max_planned_ahead=2 * num_steps)
    first = await house.start_batcher()
    await house.publish(run, *(group(f"g{i}") for i in range(num_steps)))
    await _wait_for_plans(house, run, num_steps)
    await first.stop()

    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("next"))
    await trainer.start()
    (pulled,) = await trainer.get(num_steps + 1)

    assert pulled.mini_batch.rows.group_id == ["next", "next"]
    assert pulled.mini_batch.rows.row_id.tolist() == [2 * num_steps, 2 * num_steps + 1]


async def _wait_for_plans(house, run: str, num_plans: int) -> None:
    await wait_until_async(
        lambda: house.client.xlen(keys.run_keys(run).plan) >= num_plans,
        describe=f"{num_plans} plans",
    )


async def test_a_history_of_several_pages_is_folded_in_whole(house):
    num_groups = PAGE_EVENTS // 3 * 2  # three events each
    run = house.create_run(batch_groups=num_groups)
    await house.publish(run, *(group(f"g{i}") for i in range(num_groups)))

    trainer = await house.start_trainer(run)
    (pulled,) = await trainer.get(1)

    expected = [f"g{i}" for i in range(num_groups) for _ in range(2)]
    assert pulled.mini_batch.rows.group_id == expected
