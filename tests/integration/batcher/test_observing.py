"""An observer is taken for alive while it waits for data, and not while it hangs over a batch."""

import pytest

from testkit import group
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream_server.bus.sessions.observers import declare_observer

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


@pytest.mark.parametrize(("asks", "is_alive"), [(1, True), (2, False)])
async def test_observer_is_alive_if_it_asks_for_the_next_unseen_step(house, asks, is_alive):
    run = house.create_run(batch_groups=1, max_staleness=9, max_planned_ahead=3)
    caller = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"), group("g1"))
    silent = b"0:99999999999999:600000"
    async with connect_async(house.url) as client:
        observers = keys.run_keys(run).observers
        await declare_observer(client, run, observer="o", first_step=1, expiry_s=600)
        await client.hset(observers, "o", silent)

        (pulled,) = await caller.get(asks, observer="o")
        entry = await client.hget(observers, "o")

    assert pulled.mini_batch.info.step == asks
    assert (entry != silent) == is_alive
