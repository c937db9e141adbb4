from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import wait_until
from turnstream.batching.config import BatchingConfig
from turnstream.errors import FencedError
from turnstream.store.run.runs import create_run
from turnstream.types import BatchDue
from turnstream_server.bus.core.server_instance import PinnedClient
from turnstream_server.bus.leadership.leadership import Term, acquire_leadership
from turnstream_server.bus.planning.announcements import announce_due
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

NewRun = Callable[..., str]


async def test_planner_from_before_a_restart_is_fenced_despite_an_equal_epoch(
    own_server: EmbeddedServer, own_client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(own_client)
    async with PinnedClient(own_server.url) as before, PinnedClient(own_server.url) as after:
        old = await acquire_leadership(before.client, run, owner="old", lease_s=30.0)
        own_server.kill()
        shutil.rmtree(own_server.data_dir / "appendonlydir")
        own_server.restart()
        create_run(own_client, run, BatchingConfig(batch_groups=1, mini_batch_groups=1))
        new = await acquire_leadership(after.client, run, owner="new", lease_s=30.0)

        for _ in range(2):  # it does not get used to it
            with pytest.raises(FencedError, match="the store was restarted"):
                await announce_due(Term(before.client, run, old.epoch), BatchDue(step=1))
        await announce_due(Term(after.client, run, new.epoch), BatchDue(step=1))

    assert old.epoch == new.epoch


async def test_a_lost_connection_to_the_same_start_of_the_store_is_none(
    own_server: EmbeddedServer, own_client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(own_client)
    async with PinnedClient(own_server.url) as store:
        mine = await acquire_leadership(store.client, run, owner="o", lease_s=30.0)
        own_client.client_kill_filter(_type="normal", skipme=True)

        again = await acquire_leadership(store.client, run, owner="o", lease_s=30.0)

    assert again.epoch == mine.epoch


async def test_waiting_call_learns_that_the_store_was_restarted(
    own_server: EmbeddedServer, own_client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(own_client)
    async with PinnedClient(own_server.url) as store:
        await store.client.ping()
        waiting = asyncio.create_task(read_in_the_end(store, f"ts:{{{run}}}:wake"))
        await asyncio.sleep(0)
        await asyncio.to_thread(own_server.restart)

        with pytest.raises(FencedError, match="the store was restarted"):
            await waiting


async def read_in_the_end(store: PinnedClient, stream: str) -> None:
    """Wait for an entry, and ask again for as long as the store is away."""
    while True:
        try:
            await store.client.execute_command("XREAD", "BLOCK", 20_000, "STREAMS", stream, "$")
        except redis.ConnectionError:
            await asyncio.sleep(0.05)


async def test_cancellation_while_leaving_a_store_closes_every_connection(
    client: redis.Redis, server: EmbeddedServer
) -> None:
    # A replica that stopped just when a term had ended kept one.
    ids: list[Any] = []
    is_leaving = asyncio.Event()

    async def live() -> None:
        async with PinnedClient(server.url) as store:
            ids.append(await store.client.client_id())
            is_leaving.set()

    living = asyncio.create_task(live())
    await is_leaving.wait()
    living.cancel()
    with pytest.raises(asyncio.CancelledError):
        await living

    wait_until(lambda: not client.client_list(client_id=ids), describe="its end")
