from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import testkit
from turnstream.errors import CorruptRecordError, RecordError
from turnstream.records.batches import encode_mini_batch
from turnstream.types import MiniBatch
from turnstream.wire.v1.batches_pb2 import GetChunk, MiniBatchHeader
from turnstream.worker._frames import Arrival, parse_chunk, read_step

# --------------------------------------------------------------------- one message


@pytest.mark.parametrize("num_bytes", [0, 1, 127, 128, 16_383, 16_384, 3_000_000])
def test_parse_chunk_returns_a_view_of_the_data(num_bytes: int) -> None:
    message = GetChunk(data=bytes(range(256)) * (num_bytes // 256) + b"x" * (num_bytes % 256))

    parsed = parse_chunk(serialised := message.SerializeToString())

    assert isinstance(parsed, memoryview)
    assert parsed.obj is serialised
    assert bytes(parsed) == message.data


UNKNOWN_FIELD = b"\x98\x06\x01"  # field 99: 1
HEADER = MiniBatchHeader(step=3, mini_batch=1, num_mini_batches=2, num_bytes=10)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (GetChunk(header=HEADER).SerializeToString(), HEADER),
        (GetChunk(data=b"abc").SerializeToString() + UNKNOWN_FIELD, memoryview(b"abc")),
        (b"", None),
        (UNKNOWN_FIELD, None),
    ],
    ids=["header", "data before an unknown field", "empty", "kind of a newer release"],
)
def test_parse_chunk_reads_every_form_of_a_message(message: bytes, expected: object) -> None:
    assert parse_chunk(message) == expected


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
        header = MiniBatchHeader(
            step=step,
            mini_batch=index,
            num_mini_batches=len(mini_batches),
            num_bytes=encoded.num_bytes,
            content_hash=encoded.content_hash,
        )
        yield GetChunk(header=header).SerializeToString()
        for start in range(0, encoded.num_bytes, chunk_bytes):
            data = bytes(encoded.data[start : start + chunk_bytes])
            yield GetChunk(data=data).SerializeToString()


def read(sent: list[bytes], *, step: int = 1) -> list[MiniBatch]:
    arrivals = read_step(sent, step=step, admit=Arrival)
    return [arrival.decode() for arrival in arrivals]


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
def test_step_round_trips_for_any_chunk_size(chunk_bytes: int) -> None:
    sent = [testkit.mini_batch("abCD", "xYZ"), testkit.mini_batch("abC")]

    received = read(list(messages(sent, chunk_bytes=chunk_bytes)))

    testkit.assert_same(received, sent)
    for column in (received[0].rows.input_ids.values, received[0].rows.row_id):
        assert column.ctypes.data % 8 == 0


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


def test_arrival_without_a_buffer_counts_its_bytes() -> None:
    sent = list(messages([testkit.mini_batch("abC")] * 2, chunk_bytes=100))

    def admit(header: MiniBatchHeader) -> Arrival:
        return Arrival(header, keeps=header.mini_batch == 1)

    arrivals = list(read_step(sent, step=1, admit=admit))

    assert [(each.keeps, each.is_complete) for each in arrivals] == [(False, True), (True, True)]
