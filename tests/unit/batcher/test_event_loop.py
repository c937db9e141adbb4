"""Races in the event loop, its settings, and the clock of the store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading

import pytest

from turnstream.errors import UnavailableError
from turnstream_server.batcher.planner.timekeeper import SteadyClock
from turnstream_server.loops import first_result, repeat, repeat_until


async def _give(number: int) -> int:
    return number


async def _fail() -> int:
    raise ValueError("failed")


async def test_first_of_simultaneous_results_counts() -> None:
    # Which one counted was a matter of where they lay in memory.
    found = {await first_result(*map(_give, range(5))) for _ in range(100)}

    assert found == {0}


async def test_first_failure_is_raised_after_the_others_have_ended() -> None:
    has_ended = asyncio.Event()

    async def wait_for_ever() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()
        return 0

    with pytest.raises(ValueError, match="failed"):
        await first_result(wait_for_ever(), _fail())

    assert has_ended.is_set()


async def test_second_cancellation_still_waits_for_the_others() -> None:
    # They continued alone, and a connection that one of them made stayed open.
    is_ending, may_end, has_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def end_slowly() -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        is_ending.set()
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await may_end.wait()
        has_ended.set()
        return 0

    racing = asyncio.create_task(first_result(end_slowly()))
    await asyncio.sleep(0)
    racing.cancel()
    await is_ending.wait()
    racing.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await racing

    assert has_ended.is_set()


async def test_loop_logs_a_known_error_once_until_it_succeeds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outage = UnavailableError("the store is away")
    outcomes = [outage, outage, ValueError("a defect"), None, outage]
    stop, pauses = threading.Event(), list[float]()

    def work() -> None:
        if not remaining:
            stop.set()
        elif (outcome := remaining.pop(0)) is not None:
            raise outcome

    async def work_async() -> None:
        work()
        if stop.is_set():
            raise asyncio.CancelledError

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    remaining = [*outcomes]
    with pytest.raises(asyncio.CancelledError):
        await repeat(work_async, what="no news")
    remaining = [*outcomes]
    stop.clear()
    repeat_until(stop, work, what="no news")

    assert pauses == [0.05, 0.1, 0.2, 0.05]
    known = "no news: the store is away"
    assert [each.getMessage() for each in caplog.records] == [known, "no news", known] * 2


LOOK = """
import gc, json, sys
from turnstream_server.interpreter import tune_process

usual = [sys.getswitchinterval(), *gc.get_threshold()]
tune_process()
tuned = [sys.getswitchinterval(), *gc.get_threshold()]
print(json.dumps([usual, tuned, gc.get_freeze_count(), len(gc.get_objects())]))
"""


def test_a_batcher_process_stops_its_loop_for_less_than_usual() -> None:
    command = [sys.executable, "-c", LOOK]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    usual, tuned, num_frozen, num_looked_through = json.loads(done.stdout)

    assert tuned[0] < usual[0] / 5
    assert tuned[1] > usual[1]
    assert num_looked_through < num_frozen / 10


@pytest.mark.parametrize(
    ("times_s", "steady_s"),
    [
        pytest.param([(0, 0), (0.5, 0.5), (1, 1), (1.5, 1.5)], [0, 0.5, 1, 1.5], id="read often"),
        pytest.param([(0, 0), (1, 1), (2.1, 2.1), (2.6, 2.6)], [0, 1, 0, 0.5], id="long silence"),
        pytest.param([(0, 0), (0.5, 0.5), (3601, 1), (3601.5, 1.5)], [0, 0.5, 0, 0.5], id="ahead"),
        pytest.param([(0, 0), (0.5, 0.5), (-3599, 1), (-3598.5, 1.5)], [0, 0.5, 0, 0.5], id="back"),
        pytest.param(
            [(0.9 * n, 0.5 * n) for n in range(6)], [0, 0.5, 1, 0, 0.5, 1], id="small jumps add up"
        ),
    ],
)
def test_clock_is_steady_since_its_last_jump_or_long_silence(
    times_s: list[tuple[float, float]], steady_s: list[float]
) -> None:
    clock = SteadyClock(tolerance_s=1.0)

    found = [
        clock.read(server_ms=round((5000 + server_s) * 1000), now_s=now_s).steady_s
        for server_s, now_s in times_s
    ]

    assert [round(each, 6) for each in found] == steady_s
