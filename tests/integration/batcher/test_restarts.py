import asyncio

import pytest

from testkit import group, wait_until_async
from turnstream.errors import UnavailableError
from turnstream_server.embedded import EmbeddedServer

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


async def test_batcher_continues_after_the_store_was_killed_and_restarted(house_at, tmp_path):
    with EmbeddedServer(tmp_path) as server:
        house = house_at(server.url)
        run = house.create_run(batch_groups=1)
        trainer = house.trainer(await house.start_batcher(), run)
        await house.publish(run, group("g0"), group("g1"))
        await trainer.start()
        before = await trainer.get(1)

        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.restart)
        await _retried(lambda: trainer.stepped(before))
        await house.publish(run, group("g2"))
        after = [await _retried(lambda step=step: trainer.get(step)) for step in (1, 2, 3)]

    assert after[0][0].header == before[0].header
    assert [pulled[0].mini_batch.rows.group_id[0] for pulled in after] == ["g0", "g1", "g2"]


async def _retried(call):
    """Return the result of the call once the store is back."""
    results = []

    async def attempt() -> bool:
        try:
            results.append(await call())
        except UnavailableError:
            return False
        return True

    await wait_until_async(attempt, describe="the batcher to reach the store")
    return results[0]
