"""The event loop of a publisher for threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from turnstream.errors import StoreUnavailableError
from turnstream.generator.transport.thread_sender import LoopThread


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
