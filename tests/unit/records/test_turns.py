"""Turns as records."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from testkit import assert_same, ids, stored_turn
from testkit.strategies import stored_turns
from turnstream.errors import CorruptRecordError, InvalidTurnError
from turnstream.records import turns as turn_records
from turnstream.records.encoding import TURN, read_frame, write_frame
from turnstream.records.turns import decode_turn, encode_turn, read_turns
from turnstream.types import ExtraPiece, StoredTurn, StoredTurns, VersionRun
from turnstream.types.turns import turn_values
from turnstream.wire.v1 import records_pb2 as wire

COLUMNS = ("token_ids", "logprobs", "rewards", "token_weights", "loss_mask")
ROUTES = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)


def rewritten(record: bytes, *arrays: np.ndarray[Any, Any], **changes: Any) -> bytes:
    """The record with fields of its header changed, and arrays added at the end."""
    frame = read_frame(record, kind=TURN)
    header = wire.TurnHeader.FromString(frame.header)
    for spec in changes.pop("arrays", ()):
        header.arrays.append(spec)
    for name, value in changes.items():
        setattr(header, name, value)
    body = np.frombuffer(record[frame.body_start : frame.body_stop], np.uint8)
    content = header.SerializeToString()
    return write_frame(TURN, content, [body, *arrays], version=frame.version)


def crc_of(record: bytes) -> int:
    return int.from_bytes(record[-4:], "little")


@given(turn=stored_turns())
def test_decoded_turn_is_the_encoded_one(turn: StoredTurn):
    record = encode_turn(turn)

    decoded = decode_turn(record)

    assert_same(decoded, replace(turn, payload_crc=crc_of(record)))
    assert_same([*map(list, read_turns([record]))], [list(turn_values(decoded))])


def test_turns_read_together_are_those_decoded_one_by_one():
    plain = stored_turn("ab", "CdE", logprobs=-0.5, rewards=1.0, weights=0.5)
    many_runs = replace(
        stored_turn("a", "B" * 300), version_runs=tuple(VersionRun(n, 1) for n in range(300))
    )
    routed = replace(plain, extras={"routes": ExtraPiece(0, ROUTES)})
    for turns in ([plain, plain], [plain, many_runs], [plain, routed], []):
        records = [encode_turn(turn) for turn in turns]

        found = StoredTurns.of_values(read_turns(records))

        assert_same([*map(list, found)], [*map(list, StoredTurns.of(map(decode_turn, records)))])
    record = encode_turn(plain)
    stray = rewritten(record, np.ones(4, np.uint8))
    spec = wire.ArraySpec(name="logprobs", dtype="float32", shape=[1])
    short = rewritten(encode_turn(stored_turn("a", "B")), arrays=[spec])
    for damaged in (b"", record[:9], record[:-1], record[:-5] + b"\0" + record[-4:], stray, short):
        with pytest.raises(CorruptRecordError) as caught:
            read_turns([record, damaged])
        with pytest.raises(CorruptRecordError) as expected:
            decode_turn(damaged)
        assert str(caught.value) == str(expected.value)


def test_checksums_of_turns_read_together_are_computed_once(monkeypatch: pytest.MonkeyPatch):
    plain = encode_turn(stored_turn("a", "B"))
    routed = encode_turn(replace(stored_turn("a", "B"), extras={"routes": ExtraPiece(0, ROUTES)}))
    read: list[bytes] = []
    crc32 = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda record: (read.append(record), crc32(record))[1])

    read_turns([routed, plain, routed])

    assert read == [routed, plain, routed]


def test_long_header_fills_no_cache():
    versions = tuple(VersionRun(10**9 + number, 1) for number in range(300))
    record = encode_turn(replace(stored_turn("a", "B" * 300), version_runs=versions))
    before = turn_records._plain_run.cache_info()

    ((*_, found, _, _),) = read_turns([record])

    assert found == versions
    assert turn_records._plain_run.cache_info() == before


@given(turn=stored_turns())
def test_records_have_the_bytes_of_one_header_message(turn: StoredTurn):
    assert_record_of_one_message(turn)


def test_specs_of_arrays_have_the_length_of_every_size():
    for length in (0, 1, 127, 128, 300, 16_383, 16_384, 2**21 - 1, 2**21):
        assert_record_of_one_message(
            StoredTurn(
                index=0,
                parent_turn=-1,
                shared_tokens=0,
                num_response_tokens=0,
                token_ids=np.zeros(length, np.int32),
            )
        )


def assert_record_of_one_message(turn: StoredTurn):
    columns = {name: getattr(turn, name) for name in COLUMNS if getattr(turn, name) is not None}
    pieces = {name: ExtraPiece(0, values) for name, values in columns.items()}
    pieces |= {f"extra.{name}": turn.extras[name] for name in sorted(turn.extras)}
    header = wire.TurnHeader(
        index=turn.index,
        parent_turn=turn.parent_turn,
        shared_tokens=turn.shared_tokens,
        num_response_tokens=turn.num_response_tokens,
        arrays=[
            wire.ArraySpec(name=name, dtype=v.dtype.name, shape=v.shape, num_shared=shared)
            for name, (shared, v) in pieces.items()
        ],
        version_runs=[wire.VersionRun(version=v, count=n) for v, n in turn.version_runs],
        anchor=turn.anchor,
    ).SerializeToString()
    version = "token_weights" in columns

    record = encode_turn(turn)

    prefix = struct.pack("<2s1sBI", b"TS", b"T", version, len(header))
    body = b"".join(values.tobytes() for _, values in pieces.values())
    checked = prefix + header + bytes(-len(header) % 8) + body
    assert record == checked + struct.pack("<I", zlib.crc32(checked))


def test_arrays_that_say_nothing_are_not_sent():
    bare, masked = stored_turn("ab", "CDE"), stored_turn("ab", "CdE")
    said = replace(bare, loss_mask=np.ones(3, np.uint8), rewards=np.zeros(3, np.float32))

    assert encode_turn(said) == encode_turn(bare)
    assert encode_turn(stored_turn("ab", "CDE", weights=1.0)) == encode_turn(bare)
    assert encode_turn(stored_turn("ab", "CdE", weights=1.0)) == encode_turn(masked)


@pytest.mark.parametrize("weights", [None, 0.5])
def test_version_of_a_record_says_whether_it_has_weights(weights: float | None):
    # Version 1 makes an older release refuse the record; it would train the tokens unweighted.
    record = encode_turn(stored_turn("ab", "CdE", weights=weights))
    frame = read_frame(record, kind=TURN)
    body = np.frombuffer(record[frame.body_start : frame.body_stop], np.uint8)

    assert frame.version == (0 if weights is None else 1)
    other = write_frame(TURN, frame.header, [body], version=1 - frame.version)
    with pytest.raises(CorruptRecordError, match=f"record of version {1 - frame.version} with the"):
        decode_turn(other)


def test_decoded_arrays_are_views_into_the_record():
    record = encode_turn(stored_turn("ab", "CdE", logprobs=-0.5, rewards=1.0, weights=0.5))
    stored = np.frombuffer(record, np.uint8)

    turn = decode_turn(record)

    for array in (
        *(turn.token_ids, turn.logprobs, turn.rewards, turn.loss_mask),
        turn.token_weights,
    ):
        assert array is not None
        assert np.shares_memory(array, stored)
        assert not array.flags.writeable
    assert turn.token_ids.ctypes.data % 8 == stored.ctypes.data % 8


def test_unknown_arrays_and_header_fields_are_ignored():
    turn = stored_turn("ab", "CdE", logprobs=-0.5)
    experts = wire.ArraySpec(name="router_choices", dtype="float16", shape=[3, 2])
    frame_of = rewritten(encode_turn(turn), np.ones((3, 2), np.float16), arrays=[experts])
    frame = read_frame(frame_of, kind=TURN)
    field_99_as_text = b"\x9a\x06\x05newer"
    body = np.frombuffer(frame_of[frame.body_start : frame.body_stop], np.uint8)
    record = write_frame(TURN, frame.header + field_99_as_text, [body])

    decoded = decode_turn(record)

    assert_same(decoded, replace(turn, payload_crc=crc_of(record)))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("token_ids", {"token_ids": np.array([1, 2, 3], np.int64)}),
        ("token_ids", {"token_ids": np.array([[1], [2], [3]], np.int32)}),
        ("num_response_tokens", {"num_response_tokens": 4}),
        ("logprobs", {"logprobs": np.zeros(1, np.float32)}),
        ("logprobs", {"logprobs": np.zeros(2, np.float64)}),
        ("loss_mask", {"loss_mask": np.zeros(3, np.uint8)}),
        ("loss_mask", {"loss_mask": np.array([2, 1], np.uint8)}),
        ("rewards", {"rewards": np.ones(0, np.float32)}),
        ("token_weights", {"token_weights": np.ones(3, np.float32)}),
        ("token_weights", {"token_weights": np.ones(2, np.float64)}),
        ("token_weights", {"token_weights": np.array([1, -0.5], np.float32)}),
        ("token_weights", {"token_weights": np.array([np.nan, 1], np.float32)}),
        ("token_weights", {"token_weights": np.array([1, np.inf], np.float32)}),
        ("version_runs", {"version_runs": (VersionRun(0, 1),)}),
        ("parent_turn", {"parent_turn": 0}),
        ("parent_turn", {"parent_turn": -2}),
        ("shared_tokens", {"shared_tokens": 1}),
        *[
            ("extras['routes']", {"extras": {"routes": piece}})
            for piece in (
                ExtraPiece(0, np.array(["a"])),
                ExtraPiece(0, np.zeros(2, np.uint16)),
                ExtraPiece(0, np.array(3, np.int32)),
                ExtraPiece(-1, ROUTES),
                ExtraPiece(2, ROUTES),
            )
        ],
    ],
)
def test_turn_that_contradicts_itself_is_not_encoded(field: str, changes: dict[str, Any]):
    turn = replace(stored_turn("a", "BC"), **changes)

    with pytest.raises(InvalidTurnError) as caught:
        encode_turn(turn)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("num_response_tokens: 4 of 3", {"num_response_tokens": 4}),
        ("logprobs: 2 values for 1", {"num_response_tokens": 1}),
        ("parent_turn: 3 is not before", {"parent_turn": 3}),
        ("no parent", {"shared_tokens": 2}),
    ],
)
def test_record_that_contradicts_itself_is_refused(reason: str, changes: dict[str, Any]):
    record = rewritten(encode_turn(stored_turn("a", "BC", logprobs=-1.0)), **changes)

    for read in (decode_turn, lambda record: read_turns([record])):
        with pytest.raises(CorruptRecordError, match=reason):
            read(record)
    scalar = wire.TurnHeader(
        parent_turn=-1, arrays=[wire.ArraySpec(name="token_ids", dtype="int32")]
    )
    with pytest.raises(CorruptRecordError, match=r"token_ids: int32\[\] is not one row"):
        decode_turn(write_frame(TURN, scalar.SerializeToString(), [np.zeros(1, np.int32)]))
    with pytest.raises(CorruptRecordError, match="no token_ids"):
        decode_turn(write_frame(TURN, wire.TurnHeader(parent_turn=-1).SerializeToString()))


@pytest.mark.parametrize(
    ("reason", "spec"),
    [
        ("leaves its record", wire.ArraySpec(name="extra", dtype="int64", shape=[3])),
        ("stray bytes", wire.ArraySpec(name="extra", dtype="uint8", shape=[7])),
        ("float7.*no number", wire.ArraySpec(name="extra", dtype="float7", shape=[1])),
        ("no number", wire.ArraySpec(name="extra", dtype="object", shape=[1])),
        ("2f4.*no number", wire.ArraySpec(name="extra", dtype="2f4", shape=[1])),
        ("no number", wire.ArraySpec(name="extra", dtype="f4,,(", shape=[1])),
        ("loss_mask: float32", wire.ArraySpec(name="loss_mask", dtype="float32", shape=[2])),
        (
            "'token_ids' is declared twice",
            wire.ArraySpec(name="token_ids", dtype="int32", shape=[2]),
        ),
        ("is not one row of uint8", wire.ArraySpec(name="loss_mask", dtype="uint8", shape=[8, 1])),
        ("turn 0: loss_mask: 2 is", wire.ArraySpec(name="loss_mask", dtype="uint8", shape=[2])),
    ],
)
def test_array_that_contradicts_the_header_is_refused(reason: str, spec: wire.ArraySpec):
    num_bytes = 2 if "loss_mask: 2" in reason else 8
    body = np.full(num_bytes, 2, np.uint8)
    record = rewritten(encode_turn(stored_turn("a", "BC")), body, arrays=[spec])

    with pytest.raises(CorruptRecordError, match=reason):
        decode_turn(record)
    if "loss_mask: 2" not in reason:  # a value: the joined columns are checked
        with pytest.raises(CorruptRecordError, match=reason):
            read_turns([record])


def test_extra_columns_are_views_into_the_record_in_order_of_name():
    teacher = np.array([-0.5, -0.25], np.float32)
    extras = {"teacher": ExtraPiece(0, teacher), "routes": ExtraPiece(0, ROUTES)}
    record = encode_turn(replace(stored_turn("a", "BC"), extras=extras))

    decoded = decode_turn(record)

    assert_same(decoded.extras, dict(sorted(extras.items())))
    for piece in decoded.extras.values():
        assert np.shares_memory(piece.values, np.frombuffer(record, np.uint8))


def test_column_shared_with_the_parent_costs_few_bytes():
    turn = replace(stored_turn("a", "BC", index=1, parent=0, shared=5), extras={})
    piece = ExtraPiece(300, np.zeros((0, 48, 8), np.uint8))

    record = encode_turn(replace(turn, extras={"routes": piece}))

    assert_same(decode_turn(record).extras["routes"], piece)
    assert len(record) - len(encode_turn(turn)) < 50


def test_arrays_of_any_byte_order_and_stride_are_encoded():
    values = np.arange(6, dtype=">i4").reshape(2, 3).T
    turn = replace(stored_turn("", "AB"), extras={"grid": ExtraPiece(0, values)})
    turn = replace(turn, token_ids=ids("AxB")[::2])

    decoded = decode_turn(encode_turn(turn))

    assert decoded.token_ids.tolist() == ids("AB").tolist()
    assert decoded.extras["grid"].values.tolist() == values.tolist()
    assert decoded.extras["grid"].values.dtype == np.dtype("<i4")


@pytest.mark.parametrize(
    ("reason", "specs"),
    [
        (r"int32\[\] are no values", [{"shape": []}]),
        ("'extra.x' is declared twice", [{"dtype": "uint8", "shape": [1]}] * 2),
        ("uint16.* are no values", [{"dtype": "uint16", "shape": [1]}]),
        ("3 values shared with turn -1", [{"shape": [1], "num_shared": 3}]),
        ("leaves its record", [{"shape": [1000]}]),
    ],
)
def test_impossible_extra_columns_are_refused(reason: str, specs: list[dict[str, Any]]):
    arrays = [wire.ArraySpec(**{"name": "extra.x", "dtype": "int32", **spec}) for spec in specs]
    counts = [int(np.prod(list(spec.shape))) * np.dtype(spec.dtype).itemsize for spec in arrays]
    body = np.zeros(0 if "leaves" in reason else sum(counts), np.uint8)
    record = rewritten(encode_turn(stored_turn("a", "BC")), body, arrays=arrays)

    with pytest.raises(CorruptRecordError, match=reason):
        decode_turn(record)
