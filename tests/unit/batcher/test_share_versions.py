"""The metadata of a share by the assembly version of its plan: replicas of all releases agree."""

from __future__ import annotations

import json
from dataclasses import replace

import testkit
from testkit.arrow import read_arrow
from turnstream.batching.merge.plan import ASSEMBLY_VERSION
from turnstream_server.batcher.assembly.shares import (
    PlannedBatch,
    cut_mini_batch,
    encode_share,
)


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

    assert newest == metadata_of(5)
    assert metadata_of(4) == {name: each for name, each in newest.items() if name != b"totals"}
    members = [member for group in testkit.manifest().groups for member in group.trajectories]
    totals = json.loads(newest[b"totals"])
    assert totals["num_trajectories"] == len(members)
    assert totals["reward_sum"] == sum(member.reward for member in members)
    assert totals["num_turn_tokens"] == sum(member.num_turn_tokens for member in members)
