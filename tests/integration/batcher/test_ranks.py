"""Two ranks of one session, and a store that loses a plan that one of them has."""

import asyncio
from typing import Any

import pytest

from testkit import group, wait_until_async
from turnstream.errors import NotReadyError, StoreBehindError
from turnstream.store.client import keys

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


async def test_step_with_two_manifests_is_acknowledged_for_no_rank(house_at, own_server, past_of):
    house = house_at(own_server.url)
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(lease_s=1.0), run)
    await trainer.start("s", dp_world_size=2)
    past = past_of(own_server)
    await house.publish(run, group("lost"))
    (lost,) = await trainer.get(1, dp_rank=1)
    await asyncio.to_thread(past.come_back)
    await house.publish(run, group("other"))

    (other,) = await got(trainer, 1, dp_rank=0)

    assert (hash_of(lost), lost.rows) != (hash_of(other), other.rows)
    with pytest.raises(NotReadyError, match="does not know that dp_rank 1 has it"):
        await trainer.stepped([other])
    waiting = asyncio.create_task(trainer.get(2, dp_rank=0, previous_hash=hash_of(other)))
    with pytest.raises(StoreBehindError, match=r"step 1 was delivered to dp_rank 1 .* as step 1"):
        await trainer.get(2, dp_rank=1, previous_hash=hash_of(lost))
    with pytest.raises(StoreBehindError, match="step 1 was delivered to dp_rank 1"):
        await waiting
    with pytest.raises(StoreBehindError, match="step 1 was delivered to dp_rank 1"):
        await trainer.stepped([other])
    await trainer.start("next", dp_world_size=2)
    again = [(await trainer.get(1, dp_rank=dp_rank))[0] for dp_rank in range(2)]
    assert (await trainer.stepped(again[1:])).step == 1


async def test_rank_with_part_of_a_batch_gets_no_part_of_another(house):
    _, trainer = await house.started(group("g0"), batch_groups=1, session="s")

    (whole,) = await trainer.get(1)
    await trainer.get(1, manifest_hash=hash_of(whole))
    with pytest.raises(StoreBehindError, match="step 1 was delivered to dp_rank 0 from"):
        await trainer.get(1, manifest_hash="0" * 64)


async def test_batch_lost_while_a_rank_waits_ends_the_session(house_at, own_server, past_of):
    house = house_at(own_server.url)
    run = house.create_run(batch_groups=1, max_planned_ahead=0)
    replica = await house.start_batcher(lease_s=1.0)
    trainer, other = house.trainer(replica, run), house.trainer(replica, run)
    await trainer.start("s", dp_world_size=2)
    await other.start("s", dp_world_size=2)
    past = past_of(own_server)
    await house.publish(run, group("lost"))
    (lost,) = await trainer.get(1, dp_rank=1)
    waiting = asyncio.create_task(got(trainer, 2, dp_rank=1, previous_hash=hash_of(lost)))
    await asyncio.to_thread(past.come_back)

    with pytest.raises(StoreBehindError, match="step 1 was delivered to dp_rank 1"):
        await waiting
    with pytest.raises(StoreBehindError, match="step 1 was delivered to dp_rank 1"):
        await got(other, 1, dp_rank=0)


async def test_rank_whose_last_batch_is_lost_reports_it_on_discovery(
    house,
):
    run, trainer = await house.started(
        group("g0"), batch_groups=1, max_planned_ahead=0, session="s"
    )
    (only,) = await trainer.get(1)
    names = keys.run_keys(run)

    before = num_reads(house.client)
    waiting = asyncio.create_task(trainer.get(2, previous_hash=hash_of(only)))
    await wait_until_async(
        lambda: is_read_since(house.client, before), describe="a call that waits"
    )
    house.client.hdel(names.batches, 1)
    house.client.hset(names.frontier, "planned", 0)
    house.client.xadd(names.wake, {"w": ""})
    with pytest.raises(StoreBehindError):
        await waiting

    lost: Any = house.client.hget(names.frontier, "session_lost")
    assert lost.startswith(b"1:step 1 was delivered")


def num_reads(client):
    """How often the store was asked for a whole frontier, or another hash."""
    return client.info("commandstats")["cmdstat_hgetall"]["calls"]


async def is_read_since(client, before):
    return num_reads(client) > before


def hash_of(pulled):
    return pulled.mini_batch.info.manifest_hash


async def got(trainer, step, **asked):
    """Return the answer to a rank that asks again while the store restarts."""
    pulled = []

    async def gets():
        try:
            pulled[:] = await trainer.get(step, wait_s=1.0, **asked)
        except ConnectionError:
            return False
        return True

    await wait_until_async(gets, describe=f"step {step}")
    return pulled
