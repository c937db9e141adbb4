from __future__ import annotations

from typing import Any

import pytest

from testkit import group, wait_until_async
from turnstream.store.client import keys
from turnstream.types import RecoveryToken
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.bus.admin.forks import fork_run
from turnstream_server.bus.planning.manifests import read_plan
from turnstream_server.bus.queries.ledger import read_ledger

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

SMALL = Upkeep(snapshot_events=1, snapshot_steps=1, fold_ended=2)


async def train(trainer: Any, *steps: int) -> tuple[list[Any], list[RecoveryToken]]:
    """All mini-batches of these steps, which are committed; and their tokens."""
    pulled: list[Any] = []
    tokens: list[RecoveryToken] = []
    for step in steps:
        pulled += await trainer.get(step)
        tokens.append(await trainer.stepped(pulled[-1:]))
        await trainer.committed(tokens[-1])
    return pulled, tokens


async def folded(house: Any, run: str, step: int) -> None:
    name = keys.run_keys(run).frontier
    await wait_until_async(
        lambda: int(house.client.hget(name, "folded") or 0) == step,
        describe=f"{step} folded steps",
    )


@pytest.mark.parametrize(("num_steps", "retained"), [(4, 2), (3, 1)])
async def test_the_oldest_checkpoint_can_be_forked_when_its_plan_is_gone(
    house, num_steps: int, retained: int
):
    run = house.create_run(batch_groups=1, retain_checkpoints=retained)
    new_run = f"{run} fork"
    replica = await house.start_batcher(upkeep=SMALL)
    trainer = house.trainer(replica, run)
    await trainer.start()
    await house.publish(run, *(group(f"g{i}") for i in range(num_steps)))
    _, (*_, token) = await train(trainer, 1, 2, 3)
    await train(trainer, *range(4, num_steps + 1))
    await folded(house, run, 3)
    plans = [read_plan(house.client, run, step) is not None for step in (3, 4)]

    fork_run(house.client, run, new_run, token)
    forked = house.trainer(replica, new_run)
    reply = await forked.start(token=str(token))
    await house.publish(new_run, group("g0"), group("g1"))
    pulled, _ = await train(forked, 4, 5)

    rows = [int(row) for each in pulled for row in each.mini_batch.rows.row_id]
    assert plans == [False, num_steps == 4]
    assert (reply.next_step, reply.newest_version) == (4, -1)
    assert rows == list(range(rows[0], rows[0] + len(rows)))
    assert rows[0] == 6  # three batches of two rows
    assert {group_id for each in pulled for group_id in each.mini_batch.rows.group_id} == {
        *("g0", "g1"),
    }
    ledger = read_ledger(house.client, new_run)
    ledger.check()
    assert ledger.accepted == 10


async def test_a_successor_plans_a_fork_on_and_releases_what_it_trained(house):
    run = house.create_run(batch_groups=1)
    new_run = f"{run} fork"
    first = await house.start_batcher(lease_s=0.6)
    trainer = house.trainer(first, run)
    await trainer.start()
    await house.publish(run, group("g0"), group("g1"))
    _, (*_, token) = await train(trainer, 1, 2)
    fork_run(house.client, run, new_run, token)
    forked = house.trainer(first, new_run)
    await forked.start(token=str(token))
    await house.publish(new_run, *(group(f"g{i}") for i in range(4)))
    await train(forked, 3)
    await first.stop()

    second = await house.start_batcher(lease_s=0.6, upkeep=SMALL)
    successor = house.trainer(second, new_run)
    successor.session_epoch = forked.session_epoch
    await train(successor, 4, 5, 6)

    await folded(house, new_run, 5)
    read_ledger(house.client, new_run).check()
    assert sorted(map(int, house.client.hkeys(keys.run_keys(new_run).past))) == [3, 4, 5]
