"""The process of a batcher: its start, its end, and its connections."""

import asyncio
import contextlib
import signal
import subprocess
import sys

import pytest

from testkit import group, wait_until_async
from turnstream.errors import InvalidConfigError, StoreUnavailableError, UnavailableError
from turnstream.store.client.connection import Link, connect_async
from turnstream.store.client.scripts import pack
from turnstream_server.batcher.assembly.assembler import Assembler, read_planned_batch
from turnstream_server.batcher.assembly.payload import DamagedPayloadError, PayloadReader
from turnstream_server.batcher.planner import planner
from turnstream_server.batcher.serving import servicer
from turnstream_server.batcher.serving.service import BatcherOptions, run_batcher, serving
from turnstream_server.embedded import EmbeddedServer

SERVE = """
import sys
from pathlib import Path
from turnstream_server.batcher.serving.service import BatcherOptions
from turnstream_server.batcher.serving.service import run_batcher

run_batcher(BatcherOptions(redis_url=sys.argv[1], address_file=Path(sys.argv[2])))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_batcher_process_serves_until_a_signal_and_ends_without_error(
    cluster, tmp_path, number
):
    run, file = cluster.create_run(batch_groups=1), tmp_path / "run" / "address"
    command = [sys.executable, "-c", SERVE, cluster.url, str(file)]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    await wait_until_async(file.exists, describe="the address of the batcher")
    trainer = cluster.trainer(file.read_text(), run)
    await cluster.publish(run, group("g0"))
    await trainer.start()
    (pulled,) = await trainer.get(1)
    process.send_signal(number)
    _, errors = await process.communicate()

    assert len(pulled.rows) == 2
    assert (process.returncode, errors) == (0, b"")


async def test_taken_address_is_refused_with_the_address(cluster):
    taken = (await cluster.start_batcher()).address

    with pytest.raises(InvalidConfigError, match=taken):
        async with serving(BatcherOptions(redis_url=cluster.url, listen=taken)):
            pass


def test_a_store_that_does_not_answer_ends_the_start():
    with pytest.raises(StoreUnavailableError):
        run_batcher(BatcherOptions(redis_url="redis://127.0.0.1:1/0"))


@pytest.mark.parametrize(
    ("owner", "name"), [(planner.RunPlanner, "_check_server"), (planner, "note_trouble")]
)
async def test_replica_stops_while_a_call_to_the_store_misses_its_cancellation(
    cluster, monkeypatch, owner, name
):
    # The Redis client does so below Python 3.12, if a cancellation comes just when it is done.
    is_called, call = asyncio.Event(), getattr(owner, name)

    async def miss_first_cancellation(*args, **kwargs):
        if not is_called.is_set():
            is_called.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return await call(*args, **kwargs)

    async def fail(_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(owner, name, miss_first_cancellation)
    run = cluster.create_run(batch_groups=1)
    batcher = await cluster.start_batcher(before_write=fail)
    await cluster.publish(run, group("g0"))
    await is_called.wait()

    async with asyncio.timeout(60):
        await batcher.stop()


async def test_a_replica_that_has_stopped_answers_no_call_any_more(cluster, monkeypatch):
    run = cluster.create_run()
    is_asked, has_ended = asyncio.Event(), asyncio.Event()

    async def start(*args, **kwargs):
        """Takes a while to end after a cancellation."""
        is_asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        ending = asyncio.create_task(asyncio.sleep(0.2))
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([ending])
        has_ended.set()
        raise asyncio.CancelledError

    monkeypatch.setattr(servicer, "start_session", start)
    batcher = await cluster.start_batcher()
    call = asyncio.create_task(cluster.trainer(batcher, run).start())
    await is_asked.wait()

    await batcher.stop()

    assert has_ended.is_set()
    with pytest.raises(UnavailableError):
        await call


async def test_payload_is_read_after_restart_with_many_stale_connections(cluster_at, tmp_path):
    # The next idle connection is as stale as the first one.
    with EmbeddedServer(tmp_path) as server:
        cluster = cluster_at(server.url)
        run = cluster.create_run(batch_groups=1)
        await cluster.start_batcher()
        await cluster.publish(run, group("g0"))
        await cluster.planned(run, 1)
        batch = await asyncio.to_thread(read_planned_batch, server.url, run, 1)
        members = [member for each in batch.manifest.groups for member in each.trajectories]
        reader = PayloadReader(server.url)
        links = [Link(server.url) for _ in range(2)]
        for link in links:
            link.exchange(pack([("PING",)]), 1)
        reader._idle += links  # pyright: ignore[reportPrivateUsage]

        await asyncio.to_thread(server.restart)
        payload = await asyncio.to_thread(reader.read, members, run=run)
        reader.close()

    assert len(payload) == 2


async def test_rows_are_dropped_when_every_rank_has_its_share(cluster):
    run = cluster.create_run(batch_groups=1)
    await cluster.start_batcher()
    await cluster.publish(run, group("g0"))
    await cluster.planned(run, 1)
    batch = await asyncio.to_thread(read_planned_batch, cluster.url, run, 1)
    assembler = Assembler(cluster.url, max_cache_bytes=1 << 20)

    async def share(dp_rank: int, dp_world_size: int) -> str:
        made = await assembler.share(
            batch, mini_batch=0, dp_rank=dp_rank, dp_world_size=dp_world_size
        )
        return made.content_hash

    shares = [await share(rank, 2) for rank in range(2)]
    async with connect_async(cluster.url) as client:
        await client.flushdb()

    assert [await share(rank, 2) for rank in range(2)] == shares
    with pytest.raises(DamagedPayloadError):  # it has no rows for another world size
        await share(0, 1)
    await assembler.close()
