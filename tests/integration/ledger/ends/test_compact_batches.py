"""Remains of a finished batch: a compact record, and names that are used once."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from turnstream.batching.merge.plan import GroupPlan
from turnstream.errors import ConflictError
from turnstream.records.compact import decode_batch
from turnstream.store.client import keys
from turnstream.types import TrajectoryKey, TrajectoryState
from turnstream_server.ledger.planning.manifests import write_manifest
from turnstream_server.ledger.release.release import compact_batches


def fingerprints(*names: str) -> dict[bytes, bytes]:
    """Return the entries of these groups in the key `over`, if no two of them share a bucket."""
    digests = [hashlib.sha1(name.encode()) for name in names]
    return {each.hexdigest()[:3].encode(): each.digest()[:8] for each in digests}


async def test_a_folded_batch_leaves_its_names_and_a_fingerprint_of_each_group(
    released: Any,
) -> None:
    await released.compact(1)

    ledger, groups, past = [
        await released.hash_of(name) for name in ("ledger", "groups", "finished_batches")
    ]
    assert not any(name.startswith(b"g1") for name in (*ledger, *groups))
    batch = decode_batch(past[b"1"])
    assert (batch.manifest_hash, batch.step) == (released.manifests[1].hash, 1)
    assert batch.trajectories == (TrajectoryKey("g1", 0), TrajectoryKey("g1", 1))
    assert await released.hash_of("finished_groups") == fingerprints("g1")
    assert await released.client.xlen(released.keys.plan) == 3
    released.ledger().check()
    async with released.unchanged():
        await released.compact(1)


async def test_the_states_add_up_after_every_act_of_the_release(released: Any) -> None:
    async def check() -> None:
        counts = released.ledger()
        counts.check()
        assert counts.by_state[TrajectoryState.COMMITTED] == 6

    for step in (1, 2):
        plan = released.manifests[step].manifest
        await compact_batches(released.term, [plan])
        await check()
        await released.compact(step)
        await check()


async def test_plan_of_a_finished_batch_is_refused(released: Any) -> None:
    for step in (1, 2):
        await released.compact(step)
    async with released.refuses(
        ConflictError, "step 1 is planned with the manifest of a released batch"
    ):
        await write_manifest(released.term, released.manifests[1])


async def test_finished_group_cannot_be_opened_again(released: Any) -> None:
    await released.compact(1)
    async with released.refuses(ConflictError, "group g1 is finished"):
        await released.open("g1")


async def test_no_name_of_ten_thousand_is_forgotten_and_no_other_refused(run: Any) -> None:
    # Enough for several fingerprints in every bucket.
    names = [f"visit {number}" for number in range(10_000)]
    await run.plan_steps(3)
    await run.commit(await run.start("s"), 1, 2, 3)
    await run.advance_watermark()
    entries = {keys.encode_name(name): "1:planned" for name in names}
    await run.client.hset(run.keys.groups, mapping=entries)
    groups = tuple(GroupPlan(group_id=name, prompt_uid="", trajectories=()) for name in names)
    await compact_batches(run.term, [replace(run.manifests[1].manifest, groups=groups)])

    refused = 0
    for name in names[::97]:
        with pytest.raises(ConflictError, match="is finished"):
            await run.open(name)
        refused += 1
    for number in range(100):
        await run.open(f"visit {10_000 + number}")

    over = await run.hash_of("finished_groups")
    packed = b"".join(over.values())
    fingerprints = {packed[start : start + 8] for start in range(0, len(packed), 8)}
    expected = {hashlib.sha1(keys.encode_name(name).encode()).digest()[:8] for name in names}
    assert fingerprints == expected
    assert len(packed) == 80_000
    assert refused == len(names[::97])
