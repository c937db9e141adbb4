"""The assembler: its cache, the plans that it assembles, and the metadata of their shares."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

import testkit
from testkit import config, manifest
from testkit.arrow import read_arrow
from turnstream.batching.merge.plan import ASSEMBLY_VERSION, PLAIN_ASSEMBLY_VERSION
from turnstream.errors import StoreUnavailableError, UnknownFormatError
from turnstream_server.batcher.assembly.assembler import Assembler, SingleFlightCache
from turnstream_server.batcher.assembly.shares import (
    PlannedBatch,
    cut_mini_batch,
    encode_share,
)


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


def metadata_of(assembly_version: int) -> dict[bytes, bytes]:
    """Return the metadata of a share of this plan, without the version itself."""
    config = replace(testkit.config(), aggregation="prompt_mean")
    plan = replace(testkit.manifest(), assembly_version=assembly_version)
    batch = PlannedBatch(manifest=plan, manifest_hash="ab", config=config)
    rows = testkit.rows("abCD", "abE")
    cut = cut_mini_batch(batch, rows, dp_world_size=1)
    encoded = encode_share(batch, rows, cut, mini_batch=0, dp_rank=0)
    metadata: dict[bytes, bytes] = dict(read_arrow(encoded.data).schema.metadata)
    assert metadata.pop(b"assembly_version") == str(assembly_version).encode()
    return metadata


def test_shares_name_the_aggregation_from_assembly_version_4_on() -> None:
    # Replicas of two releases serve one batch: a worker refuses content that changes.
    older = metadata_of(0)

    assert b"aggregation" not in older
    assert [metadata_of(version) for version in (1, 2, 3)] == [older] * 3
    assert metadata_of(4) == {**older, b"aggregation": b"prompt_mean"}


def test_shares_have_the_totals_of_all_ranks_from_assembly_version_5_on() -> None:
    newest = metadata_of(ASSEMBLY_VERSION)

    assert newest == metadata_of(PLAIN_ASSEMBLY_VERSION)
    assert metadata_of(4) == {name: each for name, each in newest.items() if name != b"totals"}
    members = [member for group in testkit.manifest().groups for member in group.trajectories]
    totals = json.loads(newest[b"totals"])
    assert totals["num_trajectories"] == len(members)
    assert totals["reward_sum"] == sum(member.reward for member in members)
    assert totals["num_turn_tokens"] == sum(member.num_turn_tokens for member in members)
