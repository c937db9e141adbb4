from __future__ import annotations

import json
import random
import uuid
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import manifest
from turnstream.errors import CorruptRecordError, RecordError, UnknownFormatError
from turnstream.records.compact import (
    CompactBatch,
    compact_batch,
    decode_batch,
    decode_ends,
    encode_batch,
    encode_ends,
    names_group,
    trajectory_crc,
)
from turnstream.records.encoding import ENDS, write_frame
from turnstream.types import TrajectoryKey

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
group_ids = st.one_of(
    st.from_regex(r"[a-c]{0,2}-?0{0,2}[0-9]{0,20}[ab]?", fullmatch=True).filter(bool),
    texts.filter(bool),
)
keys = st.builds(TrajectoryKey, group_ids, st.integers(0, 2**31), st.integers(0, 2**31))


def batch_of(
    trajectories: list[TrajectoryKey], *, step: int = 1, lineage: str = "main"
) -> CompactBatch:
    return CompactBatch(
        step=step,
        manifest_hash="ab" * 32,
        lineage=lineage,
        trajectories=tuple(trajectories),
        crcs=tuple(zlib.crc32(repr(key).encode()) for key in trajectories),
    )


@given(st.lists(keys), st.integers(0, 2**60), texts)
def test_any_batch_survives_its_record(
    trajectories: list[TrajectoryKey], step: int, lineage: str
) -> None:
    batch = batch_of(trajectories, step=step, lineage=lineage)

    assert decode_batch(encode_batch(batch)) == batch


@pytest.mark.parametrize(
    ("reason", "most"),
    [
        ("the lease of generator-{small} ended", 6.0),
        ("the lease of rollout-{small}.pool-b:812:9f3c2{small}a ended", 6.0),
        ("TimeoutError: judge did not answer in 30 s (request {hex})", 20.0),
        ("RuntimeError: container {uuid} exited with status 137", 30.0),
        ("TimeoutError: judge did not answer in {seconds} s", 10.0),
        ("the lease of pool-9f3c21aa ended after {seconds} s", 10.0),
    ],
)
def test_an_end_costs_little_beside_what_is_random_in_its_reason(reason: str, most: float) -> None:
    rng = random.Random(1)
    visits = sorted(rng.sample(range(900_000, 900_768), 256))
    ends = {
        TrajectoryKey(f"visit-{visit}", 0): "abandoned:"
        + reason.format(
            small=rng.randrange(10, 74),
            hex=rng.randbytes(8).hex(),
            uuid=uuid.UUID(bytes=rng.randbytes(16)),
            seconds=f"{rng.uniform(30, 60):.3f}",
        )
        for visit in visits
    }

    record = encode_ends(ends)

    assert len(record) / len(ends) < most


def record_of(columns: object) -> bytes:
    return write_frame(ENDS, zlib.compress(json.dumps(columns).encode()))


GOOD = {"groups": ["g"], "members": [1], "reasons": ["filtered:x"], "ends": [0]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ends": [1]}, "names a reason that it lacks"),
        ({"ends": ["0"]}, "names a reason that it lacks"),
        ({"ends": [0, 0]}, "are not those of its trajectories"),
        ({"members": [1, 1]}, "the names of a compact record"),
        ({"members": [[0, 0, 1]]}, "the names of a compact record"),
        ({"members": [None]}, "the names of a compact record"),
        ({"weights": []}, "newer release .*weights"),
    ],
)
def test_contradictory_record_of_ends_is_refused(changes: dict[str, Any], problem: str) -> None:
    assert decode_ends(record_of(GOOD)) == {TrajectoryKey("g", 0): "filtered:x"}

    with pytest.raises(RecordError, match=problem):
        decode_ends(record_of({**GOOD, **changes}))
    for columns in ({"groups": []}, [], 5, "text"):
        with pytest.raises(CorruptRecordError, match=r"lacks ends, members|does not unpack"):
            decode_ends(record_of(columns))


def test_record_of_older_release_names_both_formats() -> None:
    # Packed columns of format 0 were reported as a damaged record.
    record = bytearray(record_of(GOOD))
    record[3] = 0
    record[-4:] = zlib.crc32(record[:-4]).to_bytes(4, "little")

    with pytest.raises(UnknownFormatError, match=r"older release .*format 0; .* reads format 1"):
        decode_ends(bytes(record))


def test_a_batch_keeps_the_names_and_one_checksum_of_every_trajectory() -> None:
    plan = manifest("a", "b", step=7)

    left = compact_batch(plan, manifest_hash="cd" * 32)

    assert [key.trajectory_id for key in left.trajectories] == ["a/0/0", "a/1/0", "b/0/0", "b/1/0"]
    assert left.crcs == (trajectory_crc((1,)),) * 4
    assert (left.step, left.manifest_hash, left.lineage) == (7, "cd" * 32, "main")
    rewards = [member.reward for group in plan.groups for member in group.trajectories]
    assert left.mean_reward == sum(rewards) / len(rewards)
    assert decode_batch(encode_batch(left)) == left


@pytest.mark.parametrize("size", [1, 8])
def test_a_trajectory_of_a_counted_group_costs_little_beside_its_checksum(size: int) -> None:
    trajectories = [
        TrajectoryKey(f"visit-{900_000 + 7 * visit % 512}", sample)
        for visit in range(512)
        for sample in range(size)
    ]

    record = encode_batch(batch_of(trajectories))

    assert len(record) / len(trajectories) < 4 + 2.4 / size + 0.1


@given(st.lists(keys, min_size=1, unique=True), st.booleans())
def test_each_group_is_found_in_its_record_before_the_record_is_decoded(
    trajectories: list[TrajectoryKey], of_ends: bool
) -> None:
    ends = {key: f"filtered:{key.group_id}" for key in trajectories}
    record = encode_ends(ends) if of_ends else encode_batch(batch_of(trajectories))

    assert not of_ends or decode_ends(record) == ends
    assert all(names_group(record, key.group_id) for key in trajectories)
    assert not names_group(record, "another group")
