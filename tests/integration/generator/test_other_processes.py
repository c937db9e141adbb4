"""Publishers and runs in forked processes, in other event loops, and after pickling."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import turnstream
from testkit import ids
from testkit.services.processes import in_fork
from testkit.services.stores import Store
from turnstream.errors import RejectedError
from turnstream.generator import Publisher

pytestmark = pytest.mark.redis


def refused(call: Callable[[], Any], pattern: str) -> None:
    with pytest.raises(RejectedError, match=pattern):
        call()


def write(trajectory: Any) -> Any:
    return trajectory.append(ids("ab"), ids("CD"), logprobs=[-0.5, -0.5], policy_version=0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_process_gets_an_error_from_every_call(store: Store) -> None:
    run = turnstream.connect(store.url).run(store.new_run(batch_groups=1))
    with run.publisher() as publisher, publisher.group("g", num_samples=2) as group:
        first, second = group
        receipt = write(first)
        publisher.flush()
        open_receipt = publisher._sender.receipt()
        calls: list[Callable[[], Any]] = [
            lambda: write(first),
            lambda: second.seal(reward=1.0),
            lambda: second.abandon("it was forked"),
            lambda: publisher.trajectory("h", 0, num_samples=1).__enter__(),
            lambda: publisher.group("h", num_samples=1).__enter__(),
            publisher.flush,
            publisher.lapsed,
            publisher.statistics,
            lambda: publisher.next_task(0.1),
            open_receipt.result,
        ]

        def check() -> None:
            for call in calls:
                refused(call, r"process \d+, which was forked.* call run\.publisher\(\) there")
            receipt.result()
            group.__exit__(None, None, None)
            first.__exit__(None, None, None)
            publisher.close()
            assert run.credit().num_groups >= 0  # a run works in both
            with run.publisher() as own, own.trajectory("own", 0, num_samples=1) as writer:
                write(writer)
                writer.seal(reward=1.0)

        with publisher._sender.lock, publisher._threads.thread._lock:  # held by another thread
            said = in_fork(check)
        assert said == "ok"
        for sample in group:
            write(sample)
            sample.seal(reward=0.0)
    assert len(store.read(run.name).sealed()) == 3


def test_second_event_loop_gets_an_error_at_its_first_call(store: Store) -> None:
    run = turnstream.connect(store.url).run(store.new_run(batch_groups=1))
    publisher = run.async_publisher()
    is_first_open, is_second_done = threading.Event(), threading.Event()

    async def first() -> None:
        async with publisher, publisher.trajectory("g", 0, num_samples=1) as writer:
            receipts.append(await write(writer))
            writers.append(writer)
            is_first_open.set()
            await asyncio.to_thread(is_second_done.wait)
            await writer.seal(reward=1.0)

    async def second() -> None:
        open_receipt = publisher._sender.receipt()
        calls: list[Callable[[], Any]] = [
            lambda: write(writers[0]),
            lambda: writers[0].seal(reward=1.0),
            lambda: publisher.group("h", num_samples=1).__aenter__(),
            lambda: publisher.trajectory("h", 0, num_samples=1).__aenter__(),
            publisher.flush,
            publisher.lapsed,
            publisher.close,
            open_receipt.result,
        ]
        for call in calls:
            with pytest.raises(RejectedError, match=r"outside the event loop of its first call"):
                await call()

    receipts: list[Any] = []
    writers: list[Any] = []
    thread = threading.Thread(target=lambda: asyncio.run(first()))
    thread.start()
    assert is_first_open.wait(30)
    try:
        asyncio.run(asyncio.wait_for(second(), 30))
        refused(lambda: writers[0].abandon("no loop"), "outside the event loop")
    finally:
        is_second_done.set()
        thread.join(30)
    assert len(store.read(run.name).sealed()) == 1


USES_PICKLES = """
import pickle, sys
service, run, announced = pickle.load(sys.stdin.buffer)
assert service.runs() == [run.name] or run.name in service.runs()
assert announced.weights_uri == "file:///w/0", announced
with run.publisher() as publisher, publisher.trajectory("g", 0, num_samples=1) as writer:
    writer.append([1, 2], [3], policy_version=0)
    writer.seal(reward=1.0)
"""


def test_pickled_service_and_run_reconnect_in_another_process(store: Store) -> None:
    service = turnstream.connect(store.url)
    run = service.run(store.new_run(batch_groups=1))
    announced = turnstream.types.VersionAnnounced(
        version=0, step=0, lineage="", weights_uri="file:///w/0"
    )
    pickled = pickle.dumps((service, run, announced))

    ended = subprocess.run(
        [sys.executable, "-c", USES_PICKLES],
        input=pickled,
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr.decode()
    assert len(store.read(run.name).sealed()) == 1
    publisher = run.publisher()
    for own in (publisher, publisher.trajectory("h", 0, num_samples=1)):
        with pytest.raises(TypeError, match=r"a publisher cannot be pickled: pass the run"):
            pickle.dumps(own)
    publisher.close()


UNCLOSED = """
import logging, sys
import asyncio, turnstream
logging.basicConfig()
run = turnstream.connect(sys.argv[1]).run(sys.argv[2])
async def main():
    publisher = run.async_publisher(writer="forgetful")
    writer = await publisher.trajectory("g", 0, num_samples=1).__aenter__()
    await writer.append([1, 2], [3], policy_version=0)
if sys.argv[3] == "asyncio.run":
    asyncio.run(main())
elif sys.argv[3] == "a loop that is never closed":
    asyncio.new_event_loop().run_until_complete(main())
else:
    writer = run.publisher(writer="forgetful").trajectory("g", 0, num_samples=1).__enter__()
    writer.append([1, 2], [3], policy_version=0)
"""


@pytest.mark.parametrize("kind", ["threads", "asyncio.run", "a loop that is never closed"])
def test_program_that_forgets_to_close_ends_with_one_warning(store: Store, kind: str) -> None:
    run = store.new_run(batch_groups=1)

    ended = subprocess.run(
        [sys.executable, "-c", UNCLOSED, store.url, run, kind],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    [line] = ended.stderr.splitlines()
    assert "publisher forgetful was never closed" in line


def test_unused_publisher_is_closed_after_a_fork(store: Store) -> None:
    publisher = Publisher(store.url, store.new_run(batch_groups=1))

    assert in_fork(publisher.close) == "ok"
    publisher.close()
