from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import testkit
from turnstream.errors import CorruptRecordError
from turnstream.records.batches import decode_mini_batch, encode_mini_batch
from turnstream.types import MiniBatch
from turnstream.wire.v1.batches_pb2 import GetChunk, MiniBatchHeader
from turnstream.worker._prefetch import read_step


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
    arrivals = read_step(sent, step=step, admit=buffer_of)
    return [
        decode_mini_batch(data or b"", expected_hash=header.content_hash)
        for header, data in arrivals
    ]


def buffer_of(header: MiniBatchHeader) -> memoryview:
    return memoryview(bytearray(header.num_bytes))


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


def test_bytes_without_a_buffer_are_only_counted() -> None:
    sent = list(messages([testkit.mini_batch("abC")] * 2, chunk_bytes=100))

    def admit(header: MiniBatchHeader) -> memoryview | None:
        return buffer_of(header) if header.mini_batch == 1 else None

    arrivals = list(read_step(sent, step=1, admit=admit))

    assert [(header.mini_batch, data is None) for header, data in arrivals] == [
        *((0, True), (1, False))
    ]


def test_kind_of_message_of_a_newer_release_is_ignored() -> None:
    header, *data = messages([testkit.mini_batch("abC")])

    assert len(read([header, b"\x98\x06\x01", b"", *data])) == 1


@pytest.mark.parametrize("message", [b"\x12\x80", b"\x12\x05abc", b"\x0a\x05abc", b"\xff"])
def test_message_that_is_no_chunk_is_refused(message: bytes) -> None:
    with pytest.raises(CorruptRecordError, match="no GetChunk in"):
        read([message])
