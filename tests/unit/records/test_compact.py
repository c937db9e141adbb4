from __future__ import annotations

import random
import uuid
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import manifest
from turnstream.errors import CorruptRecordError
from turnstream.records.compact import (
    CompactBatch,
    CompactEnds,
    compact_batch,
    compact_ends,
    decode_batch,
    decode_ends,
    encode_batch,
    encode_ends,
    trajectory_crc,
)
from turnstream.records.framing import ENDS, read_frame, write_frame
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


def test_a_reason_may_have_any_character() -> None:
    key = TrajectoryKey("g", 0)
    ended = CompactEnds(trajectories=(key,), ends=("abandoned:8 of\0 9, \x01, \u0663\u00b2 x7é",))

    assert decode_ends(encode_ends(ended)) == ended


@given(st.lists(st.from_regex(r"([ab]{0,2} ?[0-9a-f]{8} ?[0-9]{0,3}){0,2}", fullmatch=True)))
def test_any_reasons_with_words_of_digits_survive_their_record(texts: list[str]) -> None:
    keys = tuple(TrajectoryKey("g", sample) for sample in range(len(texts)))
    ended = CompactEnds(trajectories=keys, ends=tuple(texts))

    assert decode_ends(encode_ends(ended)) == ended


@pytest.mark.parametrize(
    ("reason", "most"),
    [
        ("the lease of generator-{small} ended", 2.5),
        ("the lease of rollout-{small}.pool-b:812:9f3c2{small}a ended", 3.5),
        ("TimeoutError: judge did not answer in 30 s (request {hex})", 5.7),
        ("RuntimeError: container {uuid} exited with status 137", 5.7),
        ("TimeoutError: judge did not answer in {seconds} s", 4.5),
        ("the lease of pool-9f3c21aa ended after {seconds} s", 4.5),
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

    record = encode_ends(compact_ends(ends))

    assert len(record) / len(ends) < most


@pytest.mark.parametrize(
    ("reason", "left"),
    [
        ("(request 8f3a1b2c77d0e1f2)", "(request 8f3a1b2c…)"),
        ("container 8f3a1b2c-77d0-41f2-9c3d-0123456789ab exited", "container 8f3a1b2c… exited"),
        ("<Judge object at 0x7f3a1b2c4d5e>", "<Judge object at 0x7f3a1b…>"),
        ("(request 8f3a1b2c)", "(request 8f3a1b2c)"),
        ("the lease of generator12345-a100x8:812 ended", None),
        ("model-20261122 after 1234567890123 ms", None),
    ],
)
def test_of_an_id_in_a_reason_stays_the_beginning(reason: str, left: str | None) -> None:
    ended = compact_ends({TrajectoryKey("g", 0): f"abandoned:{reason}"})

    assert ended.ends == (f"abandoned:{left or reason}",)


def test_a_record_of_ends_that_contradicts_itself_is_refused() -> None:
    keys = [TrajectoryKey("g", sample) for sample in range(4)]
    ends = tuple(f"abandoned:request {sample:08x}" for sample in range(4))
    good = encode_ends(CompactEnds(trajectories=tuple(keys), ends=ends))
    frame = read_frame(good, kind=ENDS)
    numbers = np.frombuffer(good[frame.body_start : frame.body_stop], "<u4")

    for array, problem in (
        (numbers[:-1], "the array of a compact record is cut short"),
        (np.append(numbers, np.uint32(1)), "numbers of no reason"),
    ):
        with pytest.raises(CorruptRecordError, match=problem):
            decode_ends(write_frame(ENDS, frame.header, [array]))


@pytest.mark.parametrize("column", [-1, -2])
def test_a_record_of_ends_that_names_what_it_lacks_is_refused(column: int) -> None:
    ended = CompactEnds(trajectories=(TrajectoryKey("g", 0),), ends=("filtered:x",))
    frame = read_frame(encode_ends(ended), kind=ENDS)
    columns = bytearray(zlib.decompress(frame.header))
    columns[column] = 5

    with pytest.raises(CorruptRecordError, match="names a reason that it lacks"):
        decode_ends(write_frame(ENDS, zlib.compress(bytes(columns))))


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
