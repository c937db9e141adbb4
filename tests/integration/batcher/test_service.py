"""The process of a batcher: its start, its end, and its connections."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from testkit import group, wait_until
from turnstream.errors import InvalidConfigError, StoreUnavailableError, UnavailableError
from turnstream_server.batcher.assembly.local import read_planned_batch
from turnstream_server.batcher.assembly.payload import Payload, PayloadReader
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


@pytest.fixture
def start_process(house) -> Iterator[Callable[[Path], subprocess.Popen]]:
    """Starts a batcher as a process that writes its address to a file."""
    processes: list[subprocess.Popen] = []

    def start(address_file: Path) -> subprocess.Popen:
        command = [sys.executable, "-c", SERVE, house.url, str(address_file)]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        wait_until(address_file.exists, describe="the address of the batcher")
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_batcher_process_serves_until_a_signal_and_ends_without_complaint(
    house, start_process, tmp_path, number
):
    run = house.create_run(batch_groups=1)
    process = start_process(tmp_path / "run" / "address")
    trainer = house.trainer((tmp_path / "run" / "address").read_text(), run)
    await house.publish(run, group("g0"))
    await trainer.start()
    (pulled,) = await trainer.get(1)

    process.send_signal(number)
    _, complaints = process.communicate(timeout=60)

    assert len(pulled.rows) == 2
    assert (process.returncode, complaints) == (0, "")


async def test_taken_address_is_refused_with_the_address(house):
    taken = (await house.start_batcher()).address

    with pytest.raises(InvalidConfigError, match=taken):
        async with serving(BatcherOptions(redis_url=house.url, listen=taken)):
            pass


def test_a_store_that_does_not_answer_ends_the_start():
    with pytest.raises(StoreUnavailableError):
        run_batcher(BatcherOptions(redis_url="redis://127.0.0.1:1/0"))


@pytest.fixture
def forget_once(monkeypatch) -> Callable[[object, str], asyncio.Event]:
    """Lets a call forget the first cancellation, and says when it may come.

    So does the Redis client below Python 3.12, where a cancellation comes just when it is done.
    """

    def replace(owner: object, name: str) -> asyncio.Event:
        is_called, call = asyncio.Event(), getattr(owner, name)

        async def forgetful(*args, **kwargs):
            if not is_called.is_set():
                is_called.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            return await call(*args, **kwargs)

        monkeypatch.setattr(owner, name, forgetful)
        return is_called

    return replace


async def test_a_replica_that_stops_while_it_greets_the_store_stops_at_once(house, forget_once):
    house.create_run()
    is_greeting = forget_once(planner.RunPlanner, "_check_server")
    batcher = await house.start_batcher()
    await is_greeting.wait()

    async with asyncio.timeout(60):
        await batcher.stop()


async def test_replica_stops_while_it_records_why_planning_failed(house, forget_once):
    async def fail(_):
        raise RuntimeError("a defect")

    is_recording = forget_once(planner, "note_trouble")
    run = house.create_run(batch_groups=1)
    batcher = await house.start_batcher(before_write=fail)
    await house.publish(run, group("g0"))
    await is_recording.wait()

    async with asyncio.timeout(60):
        await batcher.stop()


async def test_a_replica_that_has_stopped_answers_no_call_any_more(house, monkeypatch):
    run = house.create_run()
    is_asked, is_over = asyncio.Event(), asyncio.Event()

    async def start(*args, **kwargs):
        """Takes a while to end after a cancellation."""
        is_asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        ending = asyncio.create_task(asyncio.sleep(0.2))
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([ending])
        is_over.set()
        raise asyncio.CancelledError

    monkeypatch.setattr(servicer, "start_session", start)
    batcher = await house.start_batcher()
    call = asyncio.create_task(house.trainer(batcher, run).start())
    await is_asked.wait()

    await batcher.stop()

    assert is_over.is_set()
    with pytest.raises(UnavailableError):
        await call


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
