"""Token buckets of keys, with a clock of numbers; and places for requests, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import wait_until_async
from turnstream.errors import RejectedError
from turnstream_server.keys.limits import (
    BURST_S,
    Held,
    Meter,
    Meters,
    Places,
    TokenBucket,
    release_place,
    without_place,
)
from turnstream_server.keys.records import ApiKey, KeyLimits

rates = st.floats(0.01, 1e6)


@given(rates, st.lists(st.floats(0, 10), max_size=50))
def test_mean_rate_is_never_exceeded_by_more_than_a_burst(rate: float, pauses: list[float]):
    bucket, now_s, used = TokenBucket(rate, now_s=0.0), 0.0, 0
    for pause_s in pauses:
        now_s += pause_s
        while used < 1_000 and bucket.missing_s(1, now_s=now_s) == 0:
            bucket.take(1)
            used += 1

    assert used <= max(1.0, rate * BURST_S) + rate * now_s + 1e-6 * used


@given(rates, st.floats(0.1, 1e9))
def test_a_wait_is_long_enough_and_no_longer(rate: float, amount: float):
    bucket = TokenBucket(rate, now_s=0.0)
    bucket.take(amount)

    wait_s = bucket.missing_s(amount, now_s=0.0)

    assert bucket.missing_s(amount, now_s=wait_s * 0.999) > 0 or wait_s < 1e-6
    assert bucket.missing_s(amount, now_s=wait_s * 1.001) == 0


def test_a_clock_that_stands_still_refills_nothing():
    bucket = TokenBucket(10.0, now_s=5.0)
    bucket.take(20)

    assert bucket.missing_s(1, now_s=5.0) == bucket.missing_s(1, now_s=4.0) == 0.1


METERS: list[tuple[KeyLimits, list[tuple[int, float]], list[float]]] = [
    (KeyLimits(requests_per_s=0.1), [(0, 0.0), (0, 0.0)], [0.0, 10.0]),
    # A refused request uses nothing of the other limit.
    (KeyLimits(1.0, 100.0), [(200, 0.0), (100, 0.0), (0, 0.0)], [0.0, 1.0, 0.0]),
    # A body above the burst waits for a full bucket, and is paid later.
    (KeyLimits(bytes_per_s=100.0), [(1_000, 0.0), (1, 0.0), (1, 8.01)], [0.0, 8.01, 0.0]),
]
"""Limits, the bytes and times of requests, and their waits."""


def test_requests_wait_for_both_limits_of_their_key():
    for limits, requests, waits in METERS:
        meter = Meter(limits, now_s=0.0)
        assert [meter.admit(num_bytes, now_s=at_s) for num_bytes, at_s in requests] == waits

    meter = Meter(KeyLimits(bytes_per_s=100.0), now_s=0.0)
    assert meter.admit(0, now_s=0.0) == 0.0
    meter.add_bytes(500)  # its length was not known
    assert meter.admit(0, now_s=0.0) == 3.0


def test_keys_are_counted_apart_and_by_their_present_limits():
    limits = KeyLimits(requests_per_s=1.0)
    one, two = (ApiKey(each, each, frozenset(), limits=limits) for each in ("one", "two"))
    meters = Meters()

    def waits(key: ApiKey) -> list[float]:
        meter = meters.of(key, now_s=0.0)
        assert meter is not None
        return [meter.admit(0, now_s=0.0) for _ in range(3)]

    changed = one._replace(limits=KeyLimits(requests_per_s=2.0))
    assert [waits(one), waits(two), waits(changed)] == [[0, 0, 1], [0, 0, 1], [0, 0, 0]]
    assert meters.of(one._replace(limits=KeyLimits(max_body_bytes=5)), now_s=0.0) is None


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
