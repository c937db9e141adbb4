"""Which groups a batch takes by the age of their tokens, on a real store and over real gRPC."""

from typing import Any

import pytest

from testkit import group, trajectory, turn
from turnstream.types import Group, TrajectoryState
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.bus.queries.ledger import read_ledger

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


def of_version(name: str, version: int) -> Group:
    """A group of two whose tokens one version sampled."""
    members = [
        trajectory(turn("ab", "CD", version=version), sample=sample, reward=float(sample))
        for sample in range(2)
    ]
    return group(name, *members)


def names(pulled: Any) -> list[str]:
    return sorted(set(pulled.mini_batch.rows.group_id))


async def train(trainer: Any, step: int) -> Any:
    """Pull a step, acknowledge it and announce the version of that number."""
    pulled = await trainer.get(step)
    await trainer.stepped(pulled)
    await trainer.announce_version(step, step=step)
    return pulled[0]


async def test_groups_that_are_too_old_expire_and_make_room_for_fresh_ones(house):
    run, trainer = await house.serve(batch_groups=1, max_staleness=1, max_age_policy="drop")
    await trainer.start()
    await trainer.announce_version(0, step=0)
    for step in (1, 2):
        await house.publish(run, of_version(f"g{step}", step - 1))
        await train(trainer, step)

    # Four groups may be live after step 2, and two of them are trained: these are more.
    await house.publish(run, *(of_version(f"late{i}", 0) for i in range(6)), of_version("new", 2))
    fresh = await train(trainer, 3)

    assert names(fresh) == ["new"]
    ledger = read_ledger(house.client, run)
    ledger.check()
    assert ledger.by_state[TrajectoryState.EXPIRED] == 12
    assert read_frontier(house.client, run).num_live_groups == 3


@pytest.mark.parametrize("is_led_anew", [False, True])
async def test_tokens_of_undone_weights_age_from_the_rollback_step(house, is_led_anew):
    run = house.create_run(
        batch_groups=1, max_staleness=2, max_age_policy="drop", retain_checkpoints=5
    )
    replica = await house.start_batcher()
    trainer = house.trainer(replica, run)
    await trainer.start()
    tokens = []
    for step in range(1, 5):
        await house.publish(run, of_version(f"g{step}", step - 1))
        tokens.append(await trainer.stepped(await trainer.get(step)))
        await trainer.committed(tokens[-1])
    await trainer.announce_version(4, step=4)

    await trainer.start("back", token=str(tokens[0]))
    for step in (2, 3, 4):
        await trainer.stepped(await trainer.get(step))
    if is_led_anew:
        await replica.stop()
        trainer = house.trainer(await house.start_batcher(), run)
        trainer.session_epoch = 2
    await house.publish(run, of_version("undone", 4), of_version("new", 5))
    (fresh,) = await trainer.get(5)

    assert names(fresh) == ["new"]
