"""Closing that completes although its caller is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from turnstream.store.client.cancellation import to_the_end


async def test_result_or_error_of_closing_is_returned() -> None:
    async def give() -> int:
        return 7

    async def fail() -> None:
        raise ValueError("failed")

    assert await to_the_end(give()) == 7
    with pytest.raises(ValueError, match="failed"):
        await to_the_end(fail())


@pytest.mark.parametrize("fails", [False, True])
async def test_second_cancellation_takes_effect_after_closing(fails: bool) -> None:
    may_end, is_over = asyncio.Event(), asyncio.Event()

    async def close() -> None:
        await may_end.wait()
        is_over.set()
        if fails:
            raise ValueError("failed")

    closing = asyncio.create_task(to_the_end(close()))
    for _ in range(2):
        await asyncio.sleep(0)
        closing.cancel()
    await asyncio.sleep(0)
    was_over = closing.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await closing

    assert not was_over
    assert is_over.is_set()
