from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

from testkit.waiting import finish
from turnstream.errors import (
    ConflictError,
    FencedError,
    NotReadyError,
    StoreBehindError,
    StoreUnavailableError,
)
from turnstream.generator.outbox.receipts import AsyncReceipt, PendingWrite, Receipt, raise_unread
from turnstream.generator.transport.thread_sender import LoopThread
from turnstream.types import TrajectoryKey

ONE, OTHER = TrajectoryKey("g", 0), TrajectoryKey("g", 1)


def test_a_receipt_is_done_with_its_last_part_and_names_all_errors() -> None:
    receipt = Receipt(2)

    receipt.settle(ONE, ConflictError("first"))
    was_done = receipt.is_done
    receipt.settle(OTHER, FencedError("second"))

    assert (was_done, receipt.is_done) == (False, True)
    assert list(receipt.errors) == [ONE, OTHER]
    with pytest.raises(ConflictError, match="first"):
        receipt.result()


def test_waiting_thread_is_woken() -> None:
    receipt = Receipt()
    waiters = [threading.Thread(target=receipt.result, args=(10,), daemon=True) for _ in range(3)]
    for waiter in waiters:
        waiter.start()

    receipt.settle(ONE)

    for waiter in waiters:
        waiter.join(10)
        assert not waiter.is_alive()


async def test_an_async_receipt_can_be_awaited_by_many() -> None:
    receipt = AsyncReceipt()

    async def awaited() -> None:
        await receipt

    waiting = [asyncio.create_task(each) for each in (receipt.result(10), awaited(), awaited())]
    done_before, _ = await asyncio.wait(waiting, timeout=0.01)

    receipt.settle(ONE)

    await asyncio.gather(*waiting)
    assert not done_before


@pytest.mark.parametrize("kind", [Receipt, AsyncReceipt])
async def test_receipt_wait_ends_by_its_deadline(kind: Any) -> None:
    with pytest.raises(NotReadyError, match=r"within 0\.01 s"):
        await finish(lambda: kind().result(0.01))


def test_unread_failures_are_raised_once_as_one_error() -> None:
    failures: list[PendingWrite] = []
    lost, only, common, asked = (ConflictError(str(number)) for number in range(4))
    for errors in ([only, common], [common, common], [asked, asked]):
        receipt = Receipt(2, unread_failures=failures)
        for key, error in zip((ONE, OTHER), errors, strict=True):
            receipt.settle(key, error)
    with pytest.raises(ConflictError):
        failures[-1].raise_error()

    with pytest.raises(ConflictError) as raised:
        raise_unread(failures, [lost])
    raise_unread(failures, [])

    assert raised.value is lost
    assert lost.others == (only, common)


@pytest.mark.parametrize(
    ("num_others", "notes"),
    [
        (0, []),
        (5, ["and 1", "and 2", "and 3", "and 4", "and 5"]),
        (7, ["and 1", "and 2", "and 3", "and 4", "and 5", "and 2 more"]),
    ],
)
def test_a_traceback_names_the_first_of_the_other_errors(num_others: int, notes: list[str]) -> None:
    lost = [StoreBehindError(str(number)) for number in range(1 + num_others)]

    with pytest.raises(StoreBehindError, match="0") as raised:
        raise_unread([], [*lost])

    assert raised.value.others == (*lost[1:],)
    assert getattr(raised.value, "__notes__", []) == notes


async def returned(value: int) -> int:
    return value


def test_closed_loop_thread_refuses_calls() -> None:
    loop = LoopThread()
    loop.close()

    loop.call_soon(lambda: pytest.fail("called"))
    with pytest.raises(StoreUnavailableError, match="the publisher was closed"):
        loop.run(returned(3))


def test_closing_ends_the_calls_of_other_threads() -> None:
    loop, is_waiting, errors = LoopThread(), threading.Event(), list[Exception]()

    async def wait() -> None:
        is_waiting.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            loop.run(wait())
        except StoreUnavailableError as error:
            errors.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    is_waiting.wait(10)
    loop.close()
    caller.join(10)

    assert [str(error) for error in errors] == ["the publisher was closed"]


INTERRUPTED = """
import asyncio, signal, sys, threading
from turnstream.generator.transport.thread_sender import LoopThread

signal.signal(signal.SIGINT, signal.default_int_handler)
loop, was_cancelled = LoopThread(), threading.Event()

async def wait():
    try:
        while True:  # a signal before the thread waits interrupts no wait
            await asyncio.sleep(0.5)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    except asyncio.CancelledError:
        was_cancelled.set()
        raise

try:
    loop.run(wait())
except KeyboardInterrupt:
    sys.exit(3 if was_cancelled.wait(10) else 4)
"""


def test_interrupted_call_is_cancelled_in_the_loop() -> None:
    # In a process of its own: a signal must not reach another test.
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], timeout=60, check=False)

    assert ended.returncode == 3
