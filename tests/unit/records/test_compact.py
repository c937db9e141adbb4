from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.errors import CorruptRecordError
from turnstream.records.compact import (
    CompactBatch,
    CompactEnds,
    compact_batch,
    decode_batch,
    decode_ends,
    encode_batch,
    encode_ends,
    trajectory_crc,
)
from turnstream.testing import manifest
from turnstream.types import TrajectoryKey

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
group_ids = st.one_of(
    st.from_regex(r"[a-c]{0,2}-?0{0,2}[0-9]{0,20}[ab]?", fullmatch=True).filter(bool),
    texts.filter(bool),
)
keys = st.builds(TrajectoryKey, group_ids, st.integers(0, 2**31), st.integers(0, 2**31))


def batch_of(trajectories: list[TrajectoryKey], *, step: int = 1) -> CompactBatch:
    return CompactBatch(
        step=step,
        manifest_hash="ab" * 32,
        lineage="main",
        trajectories=tuple(trajectories),
        crcs=tuple(zlib.crc32(repr(key).encode()) for key in trajectories),
    )


@given(st.lists(keys), st.integers(0, 2**60), texts)
def test_any_batch_survives_its_record(
    trajectories: list[TrajectoryKey], step: int, lineage: str
) -> None:
    crcs = tuple(range(len(trajectories)))
    batch = CompactBatch(
        step=step,
        manifest_hash="0f" * 32,
        lineage=lineage,
        trajectories=tuple(trajectories),
        crcs=crcs,
    )

    assert decode_batch(encode_batch(batch)) == batch


@given(st.lists(st.tuples(keys, texts)))
def test_any_ends_survive_their_record(pairs: list[tuple[TrajectoryKey, str]]) -> None:
    ended = CompactEnds(
        trajectories=tuple(key for key, _ in pairs), ends=tuple(end for _, end in pairs)
    )

    assert decode_ends(encode_ends(ended)) == ended


def test_a_batch_keeps_the_names_and_one_checksum_of_every_trajectory() -> None:
    plan = manifest("a", "b", step=7)

    left = compact_batch(plan, manifest_hash="cd" * 32)

    assert [key.trajectory_id for key in left.trajectories] == ["a/0/0", "a/1/0", "b/0/0", "b/1/0"]
    assert left.crcs == (trajectory_crc((1,)),) * 4
    assert (left.step, left.manifest_hash, left.lineage) == (7, "cd" * 32, "main")


@pytest.mark.parametrize("size", [1, 8])
def test_a_trajectory_of_a_counted_group_costs_little_beside_its_checksum(size: int) -> None:
    trajectories = [
        TrajectoryKey(f"visit-{900_000 + 7 * visit % 512}", sample)
        for visit in range(512)
        for sample in range(size)
    ]

    record = encode_batch(batch_of(trajectories))

    assert len(record) / len(trajectories) < 4 + 1.2 / size + 0.1


def test_a_record_that_is_cut_short_or_changed_is_refused() -> None:
    record = encode_batch(batch_of([TrajectoryKey("g", 0)]))

    for damaged in (record[:-1], record[:20] + b"x" + record[21:], record[:3]):
        with pytest.raises(CorruptRecordError):
            decode_batch(damaged)


def test_ends_are_no_batch() -> None:
    record = encode_ends(CompactEnds(trajectories=(TrajectoryKey("g", 0),), ends=("filtered:x",)))

    with pytest.raises(CorruptRecordError):
        decode_batch(record)
