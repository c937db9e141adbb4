"""Rows of a mini-batch: values that are checked in columns, against the check turn by turn."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from fuzz.damage import PLAIN_WAYS, forged_field, forged_header
from testkit import assert_same, turn
from testkit.planning import planned_rows, rows_of
from testkit.plans import config, manifest
from testkit.strategies import trees
from turnstream.batching.merge.merging import store_turns
from turnstream.batching.merge.plan import GroupPlan, TrajectoryPlan
from turnstream.records.turns import decode_turn, encode_turn
from turnstream.types import Rows, TrajectoryKey, Turn
from turnstream_server.batcher.assembly.payload import DamagedPayloadError, PayloadReader
from turnstream_server.batcher.assembly.shares import PlannedBatch, build_rows

Records = list[list[bytes]]

VALUES = {
    "token_ids": [-1, -(2**31)],
    "logprobs": [float("nan"), float("inf"), -3e38],
    "rewards": [float("nan"), -float("inf"), 3e38],
    "token_weights": [-0.5, float("nan"), float("inf"), 2.0],
    "loss_mask": [2, 255, 1],
}
"""Values of arrays; the last of each is allowed, except that of token_ids."""

SOUND = [
    [turn("ab", "CdE", logprobs=-0.5, rewards=0.5, version=3), turn("abcdef", "G", logprobs=-1.0)],
    [turn("x", "Y"), turn("xyz", "U", weights=[0.5])],
]


class StoredRecords(PayloadReader):
    """Reads payload from a list; counts the reads."""

    def __init__(self, records: Records) -> None:
        super().__init__("redis://nowhere")
        self.records = records
        self.num_reads = 0

    def _fetch(self, plans: Sequence[TrajectoryPlan], *, run: str) -> Iterator[list[bytes]]:
        self.num_reads += 1
        return (self.records[plan.key.sample] for plan in plans)


def planned(episodes: Sequence[Sequence[Turn]]) -> tuple[PlannedBatch, Records]:
    """Return a batch of one group of these trajectories, and their records."""
    records: Records = []
    members: list[TrajectoryPlan] = []
    for sample, turns in enumerate(episodes):
        records.append([encode_turn(each) for each in store_turns(turns)])
        stored = [*map(decode_turn, records[-1])]
        has_logprobs = all(t.logprobs is not None or not t.shape.num_trained_tokens for t in stored)
        key = TrajectoryKey("g0", sample)
        members.append(planned_rows(key, stored, has_logprobs=has_logprobs))
    group = GroupPlan(group_id="g0", prompt_uid="", trajectories=tuple(members))
    whole = replace(manifest("g0"), groups=(group,))
    return PlannedBatch(manifest=whole, manifest_hash="", config=config()), records


def with_value(record: bytes, rng: random.Random) -> bytes:
    """Return the record with one value of `VALUES` and a checksum that fits."""
    names = [name for name in VALUES if len(_array(record, name))]
    if not names:
        return record
    name = rng.choice(names)
    place = rng.randrange(len(_array(record, name)))
    return patched(record, name, place, rng.choice(VALUES[name]))


def patched(record: bytes, name: str, place: int, value: float) -> bytes:
    array, changed = _array(record, name), bytearray(record)
    start = array.ctypes.data - np.frombuffer(record, np.uint8).ctypes.data
    np.frombuffer(changed, array.dtype, len(array), start)[place] = value
    return bytes(changed[:-4]) + struct.pack("<I", zlib.crc32(changed[:-4]))


def _array(record: bytes, name: str) -> Any:
    values = getattr(decode_turn(record), name)
    return np.empty(0) if values is None else values


def without_logprobs(record: bytes, _: random.Random) -> bytes:
    return encode_turn(replace(decode_turn(record), logprobs=None))


WAYS = (with_value, with_value, without_logprobs, forged_field, forged_header, *PLAIN_WAYS)


def sealed(batch: PlannedBatch, records: Records) -> PlannedBatch:
    """Return the batch with the checksums of these records."""
    (group,) = batch.manifest.groups
    members = [
        replace(plan, payload_crcs=tuple([int.from_bytes(each[-4:], "little") for each in own]))
        for plan, own in zip(group.trajectories, records, strict=True)
    ]
    groups = (replace(group, trajectories=tuple(members)),)
    return replace(batch, manifest=replace(batch.manifest, groups=groups))


def turn_by_turn(batch: PlannedBatch, reader: PayloadReader) -> Rows:
    """Return the rows after a check of every turn by itself."""
    (group,) = batch.manifest.groups
    payload = reader.read(group.trajectories, run="run")
    return rows_of([group], payload, first_row_id=batch.manifest.mini_batches[0].first_row_id)


def result(build: Any, *arguments: Any, **options: Any) -> Rows | str:
    try:
        return build(*arguments, **options)
    except DamagedPayloadError as error:
        return str(error)


@given(
    episodes=st.lists(trees(), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    num_damages=st.integers(0, 2),
    is_sealed=st.booleans(),
)
@example(episodes=SOUND, seed=0, num_damages=0, is_sealed=True)
@example(episodes=SOUND, seed=3, num_damages=2, is_sealed=True)
def test_rows_and_errors_are_those_of_a_check_turn_by_turn(
    episodes: Sequence[Sequence[Turn]], seed: int, num_damages: int, *, is_sealed: bool
) -> None:
    batch, records = planned(episodes)
    rng = random.Random(seed)
    places = [(own, index) for own in records for index in range(len(own))]
    for own, index in rng.sample(places, min(num_damages, len(places))):
        own[index] = rng.choice(WAYS)(own[index], rng)
    if is_sealed:
        batch = sealed(batch, records)
    reader = StoredRecords(records)

    found = result(build_rows, batch, reader, mini_batch=0)

    try:
        expected: Rows | str = turn_by_turn(batch, StoredRecords(records))
    except DamagedPayloadError as error:
        expected = str(error)
    except ValueError:  # sound turns that contradict the plan
        assert isinstance(found, str)
        return
    assert_same(found, expected)
    assert reader.num_reads == (2 if isinstance(found, str) else 1)


def test_every_forbidden_value_is_named_with_its_turn() -> None:
    for name, value in [(name, value) for name, values in VALUES.items() for value in values]:
        batch, records = planned(SOUND)
        places = [
            (own, index)
            for own in records
            for index, record in enumerate(own)
            if len(_array(record, name))
        ]
        own, index = places[-1]
        own[index] = patched(own[index], name, 0, value)

        found = result(build_rows, sealed(batch, records), StoredRecords(records), mini_batch=0)

        if value == VALUES[name][-1] and name != "token_ids":
            assert not isinstance(found, str), found
        else:
            assert f": turn {index}" in str(found), (name, value, found)


def test_turn_without_the_logprobs_that_were_sealed_is_named() -> None:
    batch, records = planned(SOUND)
    records[0][1] = encode_turn(replace(decode_turn(records[0][1]), logprobs=None))

    found = result(build_rows, sealed(batch, records), StoredRecords(records), mini_batch=0)

    assert "g0/0/0: turn 1 lacks the logprobs that were sealed" in str(found)
