from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import testkit
from turnstream.errors import CorruptRecordError, RecordError
from turnstream.records.batches import EncodedMiniBatch, encode_mini_batch
from turnstream.types import MiniBatch
from turnstream.wire.v1.batches_pb2 import GetChunk, MiniBatchHeader
from turnstream.worker._frames import Arrival, Skipped, parse_chunk, read_step

# --------------------------------------------------------------------- one message


@pytest.mark.parametrize("num_bytes", [0, 1, 127, 128, 16_383, 16_384, 3_000_000])
def test_parse_chunk_returns_a_view_of_the_data(num_bytes: int) -> None:
    message = GetChunk(data=bytes(range(256)) * (num_bytes // 256) + b"x" * (num_bytes % 256))

    parsed = parse_chunk(serialised := message.SerializeToString())

    assert isinstance(parsed, memoryview)
    assert parsed.obj is serialised
    assert bytes(parsed) == message.data


def test_parse_chunk_returns_a_header() -> None:
    header = MiniBatchHeader(step=3, mini_batch=1, num_mini_batches=2, num_bytes=10)

    assert parse_chunk(GetChunk(header=header).SerializeToString()) == header


def test_parse_chunk_reads_data_before_an_unknown_field() -> None:
    message = GetChunk(data=b"abc").SerializeToString() + b"\x98\x06\x01"  # field 99: 1

    assert parse_chunk(message) == memoryview(b"abc")


@pytest.mark.parametrize("message", [b"", b"\x98\x06\x01"])
def test_parse_chunk_ignores_a_kind_of_a_newer_release(message: bytes) -> None:
    assert parse_chunk(message) is None


@pytest.mark.parametrize(
    "message",
    [b"\x12", b"\x12\x80", b"\x12\xff\xff\xff\xff", b"\x12\x05abc", b"\x0a\x05abc", b"\xff"],
)
def test_parse_chunk_refuses_other_bytes(message: bytes) -> None:
    with pytest.raises(CorruptRecordError, match="is no chunk"):
        parse_chunk(message)


@given(st.binary(max_size=40) | st.binary(max_size=6).map(b"\x12".__add__))  # the tag of data
def test_parse_chunk_agrees_with_protobuf_for_any_bytes(message: bytes) -> None:
    try:
        parsed = parse_chunk(message)
    except CorruptRecordError:
        return

    chunk = GetChunk.FromString(message)
    if isinstance(parsed, memoryview):
        assert bytes(parsed) == chunk.data
    else:
        assert parsed == (chunk.header if chunk.HasField("header") else None)


# --------------------------------------------------------------------- one step


def messages(
    mini_batches: list[MiniBatch], *, chunk_bytes: int = 1000, step: int = 1
) -> Iterator[bytes]:
    for index, mini_batch in enumerate(mini_batches):
        encoded = encode_mini_batch(mini_batch)
        yield header_of(encoded, step=step, index=index, num_mini_batches=len(mini_batches))
        for start in range(0, encoded.num_bytes, chunk_bytes):
            data = bytes(encoded.data[start : start + chunk_bytes])
            yield GetChunk(data=data).SerializeToString()


def header_of(encoded: EncodedMiniBatch, *, step: int, index: int, num_mini_batches: int) -> bytes:
    header = MiniBatchHeader(
        step=step,
        mini_batch=index,
        num_mini_batches=num_mini_batches,
        num_bytes=encoded.num_bytes,
        content_hash=encoded.content_hash,
    )
    return GetChunk(header=header).SerializeToString()


def read(sent: list[bytes], *, step: int = 1) -> list[MiniBatch]:
    arrivals = read_step(sent, step=step, admit=Arrival)
    return [arrival.decode() for arrival in arrivals if isinstance(arrival, Arrival)]


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
def test_step_round_trips_for_any_chunk_size(chunk_bytes: int) -> None:
    sent = [testkit.mini_batch("abCD", "xYZ"), testkit.mini_batch("abC")]

    received = read(list(messages(sent, chunk_bytes=chunk_bytes)))

    testkit.assert_same(received, sent)


def test_columns_are_aligned_to_8_bytes() -> None:
    [received] = read(list(messages([testkit.mini_batch("abCD")], chunk_bytes=7)))

    assert received.rows.input_ids.values.ctypes.data % 8 == 0
    assert received.rows.row_id.ctypes.data % 8 == 0


@given(position=st.integers(0, 99), fault=st.sampled_from(["cut", "lost", "twice"]))
def test_read_step_refuses_lost_and_repeated_messages(position: int, fault: str) -> None:
    sent = list(messages([testkit.mini_batch("abCD")] * 2))
    at = position % len(sent)
    rest = {"cut": [], "lost": sent[at + 1 :], "twice": sent[at:]}[fault]
    before = sent[: at + 1] if fault == "twice" else sent[:at]

    with pytest.raises(CorruptRecordError):
        read(before + rest)


def test_flipped_bits_are_refused_or_harmless() -> None:
    # Some bytes pad Arrow's buffers: flipping those is harmless, and all others are noticed.
    mini_batch = testkit.mini_batch("abCD")
    header, data = messages([mini_batch], chunk_bytes=1 << 20)
    payload = bytearray(GetChunk.FromString(data).data)
    num_refused = 0

    for position in range(0, len(payload), 3):
        payload[position] ^= 1 << position % 8
        try:
            [received] = read([header, GetChunk(data=bytes(payload)).SerializeToString()])
        except RecordError:
            num_refused += 1
        else:
            testkit.assert_same(received, mini_batch)
        payload[position] ^= 1 << position % 8

    assert num_refused > len(payload) / 12


def test_read_step_refuses_another_step() -> None:
    sent = list(messages([testkit.mini_batch("abC")], step=2))

    with pytest.raises(CorruptRecordError, match="step 2 came instead"):
        read(sent, step=1)


def test_skipped_mini_batch_is_counted_and_dropped() -> None:
    sent = list(messages([testkit.mini_batch("abC")] * 2))

    def admit(header: MiniBatchHeader) -> Skipped:
        return Arrival(header) if header.mini_batch == 1 else Skipped(header)

    kinds = [type(arrival) for arrival in read_step(sent, step=1, admit=admit)]

    assert kinds == [Skipped, Arrival]
