"""Places for requests in work, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from testkit import wait_until_async
from turnstream.errors import RejectedError
from turnstream_server.keys.limits import Held, Places, release_place, without_place


class Work:
    """Requests that stay in work until `ends` is set.

    Attributes:
        began: their names, in the order in which they took a place.
    """

    def __init__(self, *, shared: int = 1, alone: int = 1, held_s: float = 60.0) -> None:
        self.places = Places(shared=shared, alone=alone, held_s=held_s)
        self.began: list[str] = []
        self.ends = asyncio.Event()

    @asynccontextmanager
    async def taken(self, owner: str, name: str) -> AsyncIterator[None]:
        """Hold a place in the block."""
        async with self.places.borrow(owner) as place:
            await place.take()
            self.began.append(name)
            yield

    async def run(self, owner: str, name: str) -> None:
        """Stay in work until the end."""
        async with self.taken(owner, name):
            await self.ends.wait()

    async def begin(self, owner: str, *names: str) -> list[asyncio.Task[None]]:
        """Start requests, and let each come as far as it can."""
        tasks = [asyncio.create_task(self.run(owner, name)) for name in names]
        for _ in range(10):
            await asyncio.sleep(0)
        return tasks


async def test_owner_waits_for_its_own_requests_in_order() -> None:
    work = Work(shared=2, alone=2)
    first = await work.begin("a", "a0", "a1", "a2", "a3")
    other = await work.begin("b", "b0")
    assert work.began == ["a0", "a1", "b0"]
    assert work.places.num_present("a") == 4

    first[2].cancel()  # its client has gone
    await work.begin("a", "a4")
    work.ends.set()
    await asyncio.gather(*first, *other, return_exceptions=True)
    await wait_until_async(lambda: not work.places.num_present("a"))

    assert work.began == ["a0", "a1", "b0", "a3", "a4"]


async def test_owner_that_is_alone_has_more_places() -> None:
    work = Work(shared=1, alone=3)
    tasks = await work.begin("a", "a0", "a1", "a2", "a3")
    assert len(work.began) == 3

    tasks += await work.begin("b", "b0", "b1")

    assert work.began == ["a0", "a1", "a2", "b0"]
    work.ends.set()
    await asyncio.gather(*tasks)


async def test_request_that_waits_holds_no_place() -> None:
    work = Work()
    async with work.taken("a", "a0"):
        async with without_place():
            tasks = await work.begin("a", "a1")
            assert work.began == ["a0", "a1"]
            work.ends.set()
        assert tasks[0].done()  # the place is taken again after it
        tasks = await work.begin("a", "a2")
        assert work.began == ["a0", "a1"]
        release_place()
        release_place()
        await asyncio.gather(*tasks)
    release_place()  # outside of a request


async def test_place_is_passed_on_after_seconds() -> None:
    work = Work(held_s=0.01)
    tasks = await work.begin("a", "a0", "a1")

    await wait_until_async(lambda: len(work.began) == 2, describe="the second request")

    work.ends.set()
    await asyncio.gather(*tasks)


def test_held_requests_are_limited_for_each_key() -> None:
    held = Held("streams", num=3, num_of_key=2)
    with held.one_more("a"), held.one_more("a"):
        with pytest.raises(RejectedError, match=r"^2 streams of this key are open") as refused:
            held.check("a")
        with held.one_more("b"), pytest.raises(RejectedError, match=r"^3 streams are open"):
            held.check("c")
    with held.one_more("a"):
        pass
    assert refused.value.retry_after_s == 5.0
