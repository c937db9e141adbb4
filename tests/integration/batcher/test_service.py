import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from turnstream.errors import InvalidConfigError, StoreUnavailableError
from turnstream.testing import group, wait_until
from turnstream_server.batcher import planner
from turnstream_server.batcher.options import BatcherOptions
from turnstream_server.batcher.service import run_batcher, serving

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

SERVE = """
import sys
from pathlib import Path
from turnstream_server.batcher.options import BatcherOptions
from turnstream_server.batcher.service import run_batcher

run_batcher(BatcherOptions(redis_url=sys.argv[1], address_file=Path(sys.argv[2])))
"""


@pytest.fixture
def start_process(house) -> Iterator[Callable[[Path], subprocess.Popen]]:
    """Starts a batcher as a process that writes its address to a file."""
    processes: list[subprocess.Popen] = []

    def start(address_file: Path) -> subprocess.Popen:
        command = [sys.executable, "-c", SERVE, house.url, str(address_file)]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        wait_until(address_file.exists, 20, describe="the address of the batcher")
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
    _, complaints = process.communicate(timeout=10)

    assert len(pulled.rows) == 2
    assert (process.returncode, complaints) == (0, "")


async def test_an_address_that_is_taken_is_refused_by_name(house):
    taken = (await house.start_batcher()).address

    with pytest.raises(InvalidConfigError, match=taken):
        async with serving(BatcherOptions(redis_url=house.url, listen=taken)):
            pass


def test_a_store_that_does_not_answer_ends_the_start():
    with pytest.raises(StoreUnavailableError):
        run_batcher(BatcherOptions(redis_url="redis://127.0.0.1:1/0"))


async def test_a_replica_that_stops_while_it_meets_its_runs_stops_at_once(house):
    # Below Python 3.12 the Redis client forgets a cancellation that comes just when it is done: a
    # planner that was told to end while it greeted the store went on for ever.
    for _ in range(20):
        house.create_run()

    async def serve_for(seconds: float) -> None:
        async with serving(BatcherOptions(redis_url=house.url)):
            await asyncio.sleep(seconds)

    async with asyncio.timeout(60):
        for attempt in range(20):
            await serve_for(attempt / 500)


async def test_a_replica_stops_while_it_says_why_its_planning_failed(house, monkeypatch):
    # Below Python 3.12 the Redis client forgets a cancellation that comes just when it is done, as
    # this call does once: the planner went on for ever.
    is_telling, note = asyncio.Event(), planner.note_trouble

    async def forgetful_note(*args, **kwargs):
        if not is_telling.is_set():
            is_telling.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await note(*args, **kwargs)

    async def fail(_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(planner, "note_trouble", forgetful_note)
    run = house.create_run(batch_groups=1)
    batcher = await house.start_batcher(before_write=fail)
    await house.publish(run, group("g0"))
    await is_telling.wait()

    async with asyncio.timeout(10):
        await batcher.stop()
