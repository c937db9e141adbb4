from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import testkit
from turnstream.errors import CorruptRecordError
from turnstream.records.batches import decode_mini_batch, encode_mini_batch
from turnstream.types import MiniBatch
from turnstream.wire.v1.batches_pb2 import GetChunk, MiniBatchHeader
from turnstream.worker._read_step import Arrival, read_parts


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


def read(sent: list[bytes], *, step: int = 1, held: int = 0) -> list[MiniBatch]:
    return [
        decode_mini_batch(each.buffer or b"", expected_hash=each.header.content_hash)
        for each in read_parts(sent, GetChunk, step=step, held=held, admit=place_of)
    ]


def place_of(header: MiniBatchHeader) -> Arrival[MiniBatchHeader]:
    return Arrival(header, memoryview(bytearray(header.num_bytes)))


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


def test_read_step_refuses_another_step() -> None:
    sent = list(messages([testkit.mini_batch("abC")], step=2))

    with pytest.raises(CorruptRecordError, match=r"\(2, 0\) came instead"):
        read(sent, step=1)


def test_read_parts_refuses_more_bytes_than_announced() -> None:
    header, *data = messages([testkit.mini_batch("abC")], chunk_bytes=1 << 20)
    longer = GetChunk(data=GetChunk.FromString(data[0]).data + b"x").SerializeToString()

    for wrong, problem in (([header, longer], "has more than the"), (data, "before the header")):
        with pytest.raises(CorruptRecordError, match=problem):
            read(wrong)


def test_bytes_without_a_buffer_are_only_counted() -> None:
    sent = list(messages([testkit.mini_batch("abC")] * 2, chunk_bytes=100))

    def admit(header: MiniBatchHeader) -> Arrival[MiniBatchHeader]:
        return place_of(header) if header.mini_batch == 1 else Arrival(header)

    arrivals = list(read_parts(sent, GetChunk, step=1, admit=admit))

    assert [(each.header.mini_batch, each.buffer is None) for each in arrivals] == [
        *((0, True), (1, False))
    ]


def test_repeated_step_begins_with_any_mini_batch_up_to_the_first_missing() -> None:
    sent = list(messages([testkit.mini_batch("abC")] * 3, chunk_bytes=1 << 20))
    first, second, third = sent[:2], sent[2:4], sent[4:]

    assert len(read([*second, *third], held=1)) == 2
    assert len(read([*first, *second, *third], held=1)) == 3
    for wrong, held in (([*second, *third], 0), (third, 1), ([*second, *second, *third], 1)):
        with pytest.raises(CorruptRecordError, match="came instead of"):
            read(wrong, held=held)


@pytest.mark.parametrize(
    ("changes", "num_filled"),
    [({}, 4), ({"first_byte": 6}, None), ({"num_bytes": 8}, None), ({"content_hash": "d"}, None)],
)
def test_arrival_resumes_with_its_own_bytes_alone(
    changes: dict[str, Any], num_filled: int | None
) -> None:
    header = MiniBatchHeader(num_bytes=9, content_hash="c")
    arrival = Arrival(header, memoryview(bytearray(9)))
    arrival.add(b"12345")
    resumed = {"num_bytes": 9, "content_hash": "c", "first_byte": 4, **changes}

    assert arrival.resume(MiniBatchHeader(**resumed)) is (num_filled is not None)
    assert arrival.num_filled == (num_filled or 5)


def test_kind_of_message_of_a_newer_release_is_ignored() -> None:
    header, *data = messages([testkit.mini_batch("abC")])

    assert len(read([header, b"\x98\x06\x01", b"", *data])) == 1


@pytest.mark.parametrize("message", [b"\x12\x80", b"\x12\x05abc", b"\x0a\x05abc", b"\xff"])
def test_message_that_is_no_chunk_is_refused(message: bytes) -> None:
    with pytest.raises(CorruptRecordError, match="no GetChunk in"):
        read([message])
