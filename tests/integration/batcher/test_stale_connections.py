"""Payload of a batch after the store restarted: idle connections are stale."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from testkit import group, wait_until
from turnstream_server.batcher.assembly.local import read_planned_batch
from turnstream_server.batcher.assembly.payload import Payload, PayloadReader
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

NUM_THREADS = 4


async def test_payload_is_read_after_restart_with_many_stale_connections(house_at, tmp_path):
    # The second attempt took the next idle connection, which was as stale as the first one: the
    # read failed with "Connection closed by server" although the store answered.
    with EmbeddedServer(tmp_path) as server:
        house = house_at(server.url)
        run = house.create_run(batch_groups=1)
        replica = await house.start_batcher()
        await house.publish(run, group("g0"))
        trainer = house.trainer(replica, run)
        await trainer.start()
        (pulled,) = await trainer.get(1)
        batch = await asyncio.to_thread(read_planned_batch, server.url, run, 1)
        members = [member for each in batch.manifest.groups for member in each.trajectories]
        reader = PayloadReader(server.url)

        await asyncio.to_thread(read_at_once, reader, server, members, run)
        await asyncio.to_thread(server.restart)
        payload = await asyncio.to_thread(reader.read, members, run=run)
        reader.close()

    assert len(payload) == len(members) == len(pulled.rows)


def read_at_once(reader: PayloadReader, server: EmbeddedServer, members, run: str) -> list[Payload]:
    """Read with several connections: the server answers none before all are open."""
    with redis.Redis.from_url(server.url) as client, ThreadPoolExecutor(NUM_THREADS) as pool:
        num_before = client.info("stats")["total_connections_received"]
        num_sockets = count_sockets()
        os.kill(server.pid, signal.SIGSTOP)
        reads = [pool.submit(reader.read, members, run=run) for _ in range(NUM_THREADS)]
        wait_until(lambda: count_sockets() >= num_sockets + NUM_THREADS, describe="all connections")
        os.kill(server.pid, signal.SIGCONT)
        found = [each.result(30) for each in reads]
        num_opened = client.info("stats")["total_connections_received"] - num_before
    assert num_opened >= 2
    return found


def count_sockets() -> int:
    """Return the number of open sockets of this process."""
    num_sockets = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            num_sockets += str(file.readlink()).startswith("socket:")
    return num_sockets
