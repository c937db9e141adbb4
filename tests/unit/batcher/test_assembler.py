"""Which plans a replica assembles."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from testkit import config, manifest
from turnstream.batching.merge.plan import ASSEMBLY_VERSION
from turnstream.errors import StoreUnavailableError, UnknownFormatError
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.shares import PlannedBatch


@pytest.fixture
async def assembler() -> AsyncIterator[Assembler]:
    """Return an assembler without a store."""
    assembler = Assembler("redis://127.0.0.1:1/0", max_cache_bytes=1 << 20)
    yield assembler
    await assembler.close()


def batch_of_version(assembly_version: int) -> PlannedBatch:
    plan = replace(manifest(), assembly_version=assembly_version)
    return PlannedBatch(manifest=plan, manifest_hash="ab", config=config())


async def test_plan_of_a_newer_release_is_refused_with_both_versions(assembler: Assembler) -> None:
    newer = ASSEMBLY_VERSION + 1

    with pytest.raises(UnknownFormatError, match=f"newer release .*format {newer}"):
        await assembler.share(batch_of_version(newer), mini_batch=0, dp_rank=0, dp_world_size=1)


async def test_plan_of_a_newer_release_is_not_examined(assembler: Assembler) -> None:
    newer = ASSEMBLY_VERSION + 1

    with pytest.raises(UnknownFormatError, match=f"newer release .*format {newer}"):
        await assembler.examine(batch_of_version(newer))


@pytest.mark.parametrize("assembly_version", range(ASSEMBLY_VERSION + 1))
async def test_the_payload_of_older_plans_is_fetched_all_the_same(
    assembler: Assembler, assembly_version: int
) -> None:
    batch = batch_of_version(assembly_version)

    with pytest.raises(StoreUnavailableError):
        await assembler.share(batch, mini_batch=0, dp_rank=0, dp_world_size=1)
