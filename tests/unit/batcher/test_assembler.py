"""The assembler: its cache, and the plans that it assembles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from testkit import config, manifest
from turnstream.batching.merge.plan import ASSEMBLY_VERSION
from turnstream.errors import StoreUnavailableError, UnknownFormatError
from turnstream_server.batcher.assembly.assembler import Assembler, SingleFlightCache
from turnstream_server.batcher.assembly.shares import PlannedBatch


class Maker:
    """Makes values of ten bytes, and counts how often."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self) -> str:
        """Return the next value, once `may_end` is set."""
        self.num_calls += 1
        await self.may_end.wait()
        return f"value {self.num_calls}"


def cache_of(max_bytes: int) -> SingleFlightCache[str, str]:
    return SingleFlightCache[str, str](lambda _: 10, max_bytes=max_bytes)


@pytest.fixture
def slow() -> Maker:
    make = Maker()
    make.may_end.clear()
    return make


async def test_simultaneous_calls_share_one_making_that_survives_the_first(slow: Maker) -> None:
    cache = cache_of(100)
    cache.prepare("a", slow)
    first, *others = [asyncio.create_task(cache.get("a", slow)) for _ in range(5)]
    await asyncio.sleep(0)

    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    slow.may_end.set()

    assert set(await asyncio.gather(*others)) == {"value 1"}
    assert await cache.get("a", slow) == "value 1"


async def test_least_recently_used_value_is_dropped_first() -> None:
    cache, make = cache_of(20), Maker()
    for key in "abac":
        await cache.get(key, make)

    assert cache.num_bytes == 20
    assert [await cache.get(key, make) for key in "acb"] == ["value 1", "value 3", "value 4"]


async def test_value_above_the_bound_is_returned_and_not_kept() -> None:
    cache = cache_of(5)

    assert await cache.get("a", Maker()) == "value 1"
    assert cache.num_bytes == 0


async def test_failure_reaches_the_caller_and_is_not_kept() -> None:
    cache = cache_of(100)

    async def fail() -> str:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await cache.get("a", fail)

    assert await cache.get("a", Maker()) == "value 1"


async def test_dropped_values_free_their_bytes() -> None:
    cache, make = cache_of(100), Maker()
    await cache.get("a", make)
    await cache.get("b", make)

    cache.drop(lambda key: key == "a")

    assert cache.num_bytes == 10
    assert [await cache.get(key, make) for key in "ba"] == ["value 2", "value 3"]


async def test_closing_cancels_values_that_are_made(slow: Maker) -> None:
    cache = cache_of(100)
    waiting = asyncio.create_task(cache.get("a", slow))
    await asyncio.sleep(0)

    await cache.close()

    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.fixture
async def assembler() -> AsyncIterator[Assembler]:
    """Return an assembler without a store."""
    assembler = Assembler("redis://127.0.0.1:1/0", max_cache_bytes=1 << 20)
    yield assembler
    await assembler.close()


def batch_of_version(assembly_version: int) -> PlannedBatch:
    plan = replace(manifest(), assembly_version=assembly_version)
    return PlannedBatch(manifest=plan, manifest_hash="ab", config=config())


async def test_plan_of_a_newer_release_is_neither_shared_nor_examined(assembler: Assembler) -> None:
    newer = batch_of_version(ASSEMBLY_VERSION + 1)

    for calls in (
        lambda: assembler.share(newer, mini_batch=0, dp_rank=0, dp_world_size=1),
        lambda: assembler.examine(newer),
    ):
        with pytest.raises(UnknownFormatError, match=f"newer.*format {ASSEMBLY_VERSION + 1}"):
            await calls()
    for older in range(ASSEMBLY_VERSION + 1):  # their payload is fetched
        with pytest.raises(StoreUnavailableError):
            await assembler.share(batch_of_version(older), mini_batch=0, dp_rank=0, dp_world_size=1)
