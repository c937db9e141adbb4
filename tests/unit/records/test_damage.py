"""Damaged, foreign and newer records are refused by an error of ours, and never pass."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import manifest, sealed, shape, stored_turn
from testkit.runs.folds import snapshot_of
from turnstream.batching.fold.members import FoldState
from turnstream.errors import CorruptRecordError, RecordError, UnknownFormatError
from turnstream.records import compact, encoding
from turnstream.records.encoding import write_frame
from turnstream.records.evals import decode_evaluation, encode_evaluation
from turnstream.records.events import decode_event, encode_event
from turnstream.records.manifests import decode_manifest, encode_manifest
from turnstream.records.snapshots import decode_snapshot, encode_snapshot
from turnstream.records.turns import decode_turn, encode_turn
from turnstream.types import EvalResult, TrajectoryKey


class Kind(NamedTuple):
    """A kind of record, with an example."""

    letter: bytes
    decode: Callable[[bytes], object]
    record: bytes


BATCH = compact.encode_batch(compact.compact_batch(manifest("g0"), manifest_hash="ab" * 32))
ENDS = compact.encode_ends({TrajectoryKey("g", 0): "filtered:x"})
KINDS = {
    "turn": Kind(
        encoding.TURN,
        decode_turn,
        encode_turn(stored_turn("abc", "DeF", logprobs=-0.5, weights=0.5, version=1)),
    ),
    "event": Kind(
        encoding.EVENT,
        decode_event,
        encode_event(sealed(turns=[shape(2, 3), shape(0, 1, trained=0, is_left_out=True)])),
    ),
    "manifest": Kind(encoding.MANIFEST, decode_manifest, encode_manifest(manifest("g0", "g1"))),
    "compact": Kind(encoding.COMPACT, compact.decode_batch, BATCH),
    "compact ends": Kind(encoding.ENDS, compact.decode_ends, ENDS),
    "snapshot": Kind(encoding.SNAPSHOT, decode_snapshot, encode_snapshot(snapshot_of(FoldState()))),
    "evaluation": Kind(
        encoding.EVALUATION,
        lambda record: decode_evaluation(EvalResult, record),
        encode_evaluation(EvalResult(version=1)),
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def with_crc(record: bytes) -> bytes:
    """The record with its last four bytes made to fit the others again."""
    return record[:-4] + struct.pack("<I", zlib.crc32(record[:-4]))


@every_kind
def test_record_that_is_damaged_cut_short_or_of_another_kind_is_refused(kind: Kind):
    for position in range(len(kind.record)):
        for flipped_bits in (0x01, 0x80, 0xFF):
            damaged = bytearray(kind.record)
            damaged[position] ^= flipped_bits
            # Also in the version: damage must not look like a newer release, which stops a planner.
            with pytest.raises(CorruptRecordError):
                kind.decode(bytes(damaged))
        with pytest.raises(CorruptRecordError):
            kind.decode(kind.record[:position])
    for other in KINDS.values():
        if other is not kind:
            with pytest.raises(CorruptRecordError, match="it begins with"):
                kind.decode(other.record)


@every_kind
def test_newer_major_version_is_refused_with_both_versions(kind: Kind):
    newer = bytearray(kind.record)
    newer[3] += 1

    with pytest.raises(UnknownFormatError, match=rf"newer .*format {newer[3]}; .* {newer[3] - 1}"):
        kind.decode(with_crc(bytes(newer)))


@every_kind
@given(data=st.data(), content=st.binary(max_size=200))
def test_damaged_header_is_decoded_or_refused_with_a_typed_error(
    kind: Kind, data: st.DataObject, content: bytes
):
    position = data.draw(st.integers(4, len(kind.record) - 5))
    damaged = bytearray(kind.record)
    damaged[position] ^= data.draw(st.integers(1, 255))

    for record in (with_crc(bytes(damaged)), write_frame(kind.letter, content)):
        with contextlib.suppress(RecordError):
            kind.decode(record)


@every_kind
def test_stray_bytes_and_headers_beyond_the_record_are_refused(kind: Kind):
    longer = bytearray(kind.record)
    longer[4:8] = struct.pack("<I", len(kind.record))

    with pytest.raises(CorruptRecordError, match="has a header of"):
        kind.decode(with_crc(bytes(longer)))
    with pytest.raises(CorruptRecordError, match=r"stray|bytes of CRCs|not those|has not"):
        kind.decode(with_crc(kind.record[:-4] + bytes(12)))
