import asyncio

import pytest

from turnstream_server.batcher.assembly.assembler import SingleFlightCache


def num_bytes_of(_: str) -> int:
    return 10


class Maker:
    """Makes values on request, and counts how often."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self) -> str:
        """The next value, once `may_end` is set."""
        self.num_calls += 1
        await self.may_end.wait()
        return f"value {self.num_calls}"


async def test_a_kept_value_is_not_made_again():
    cache, make = SingleFlightCache[str, str](num_bytes_of, max_bytes=100), Maker()

    values = [await cache.get("a", make), await cache.get("a", make)]

    assert values == ["value 1", "value 1"]


async def test_those_who_ask_at_the_same_time_share_one_making():
    cache, make = SingleFlightCache[str, str](num_bytes_of, max_bytes=100), Maker()
    make.may_end.clear()
    waiting = [asyncio.create_task(cache.get("a", make)) for _ in range(5)]
    await asyncio.sleep(0)

    make.may_end.set()
    values = await asyncio.gather(*waiting)

    assert set(values) == {"value 1"}
    assert make.num_calls == 1


async def test_the_making_survives_the_caller_that_asked_first():
    cache, make = SingleFlightCache[str, str](num_bytes_of, max_bytes=100), Maker()
    make.may_end.clear()
    first = asyncio.create_task(cache.get("a", make))
    second = asyncio.create_task(cache.get("a", make))
    await asyncio.sleep(0)

    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    make.may_end.set()

    assert await second == "value 1"


async def test_the_least_recently_used_value_goes_first():
    cache, make = SingleFlightCache[str, str](num_bytes_of, max_bytes=20), Maker()
    await cache.get("a", make)
    await cache.get("b", make)

    await cache.get("a", make)
    await cache.get("c", make)

    assert [cache.is_kept(key) for key in "abc"] == [True, False, True]
    assert cache.num_bytes == 20


async def test_a_value_above_the_bound_is_handed_out_and_not_kept():
    cache, make = SingleFlightCache[str, str](num_bytes_of, max_bytes=5), Maker()

    value = await cache.get("a", make)

    assert value == "value 1"
    assert cache.num_bytes == 0


async def test_failure_reaches_every_waiting_caller_and_is_not_kept():
    cache = SingleFlightCache[str, str](num_bytes_of, max_bytes=100)

    async def fail() -> str:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await cache.get("a", fail)

    assert await cache.get("a", Maker()) == "value 1"


async def test_a_prepared_value_is_there_for_the_next_to_ask():
    cache, make = SingleFlightCache[str, str](num_bytes_of, max_bytes=100), Maker()

    cache.prepare("a", make)
    value = await cache.get("a", make)

    assert value == "value 1"
    assert make.num_calls == 1


async def test_dropped_values_give_their_bytes_back():
    cache, make = SingleFlightCache[str, str](num_bytes_of, max_bytes=100), Maker()
    await cache.get("a", make)
    await cache.get("b", make)

    cache.drop(lambda key: key == "a")

    assert not cache.is_kept("a")
    assert cache.num_bytes == 10


async def test_closing_stops_what_is_being_made():
    cache, make = SingleFlightCache[str, str](num_bytes_of, max_bytes=100), Maker()
    make.may_end.clear()
    waiting = asyncio.create_task(cache.get("a", make))
    await asyncio.sleep(0)

    await cache.close()

    with pytest.raises(asyncio.CancelledError):
        await waiting
