"""Works that race: the first result counts, and the others are cancelled."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from turnstream_server.batcher.planner.event_loop import first_of


async def _give(number: int) -> int:
    return number


async def _fail() -> int:
    raise ValueError("failed")


async def test_first_of_simultaneous_results_counts() -> None:
    # Which one counted was a matter of where they lay in memory.
    given = {await first_of(*map(_give, range(5))) for _ in range(100)}

    assert given == {0}


async def test_first_failure_is_raised_after_the_others_have_ended() -> None:
    is_over = asyncio.Event()

    async def wait_for_ever() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            is_over.set()
        return 0

    with pytest.raises(ValueError, match="failed"):
        await first_of(wait_for_ever(), _fail())

    assert is_over.is_set()


async def test_second_cancellation_still_waits_for_the_others() -> None:
    # They continued alone, and a connection that one of them made stayed open.
    is_ending, may_end, is_over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def end_slowly() -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        is_ending.set()
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await may_end.wait()
        is_over.set()
        return 0

    racing = asyncio.create_task(first_of(end_slowly()))
    await asyncio.sleep(0)
    racing.cancel()
    await is_ending.wait()
    racing.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await racing

    assert is_over.is_set()
