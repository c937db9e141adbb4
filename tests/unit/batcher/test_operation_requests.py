"""Limits of the requests for training calls, and the messages of their answer."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream.errors import CorruptRecordError, InvalidConfigError
from turnstream.wire.v1.operations_pb2 import (
    GetOperationsRequest,
    OperationChunk,
    OperationShareHeader,
)
from turnstream.worker.operation_pulls import read_shares
from turnstream_server.batcher.serving.get import data_messages
from turnstream_server.batcher.serving.requests import MAX_DP_WORLD_SIZE, parse_request
from turnstream_server.operations.log import MAX_SHARED

GOOD: dict[str, Any] = {
    "model_id": "S:train:0",
    "first": 5,
    "last": 5 + MAX_SHARED - 1,
    "dp_rank": 2,
    "dp_world_size": 3,
    "skipped": list(range(5, 5 + MAX_SHARED - 1)),
}
BAD: dict[str, tuple[Any, ...]] = {
    "model_id": ("", "S", "S:sample:0", "a:b:train:0", "}:train:0", f"{'S' * 512}:train:0"),
    "first": (0, 2**31, 2**64 - 1),
    "last": (0, 4, 5 + MAX_SHARED, 2**64 - 1),
    "dp_rank": (3, MAX_DP_WORLD_SIZE, 2**32 - 1),
    "dp_world_size": (0, MAX_DP_WORLD_SIZE + 1),
    "skipped": ([4], [5 + MAX_SHARED], [5] * MAX_SHARED, [*range(5, 5 + MAX_SHARED)]),
}
CASES = [
    (field.name, value)
    for field in GetOperationsRequest.DESCRIPTOR.fields
    for value in BAD[field.name]
]


@pytest.mark.parametrize(("field", "value"), CASES)
def test_bad_field_is_refused_with_its_name(field: str, value: Any) -> None:
    data = GetOperationsRequest(**{**GOOD, field: value}).SerializeToString()

    with pytest.raises(InvalidConfigError) as caught:
        parse_request(data, GetOperationsRequest)

    assert caught.value.field == field


def test_request_that_skips_all_commands_is_refused() -> None:
    data = GetOperationsRequest(**{**GOOD, "last": 6, "skipped": [5, 6]}).SerializeToString()

    with pytest.raises(InvalidConfigError, match="skipped: all commands from 5 to 6 are skipped"):
        parse_request(data, GetOperationsRequest)


def test_request_at_its_limits_is_accepted() -> None:
    request = GetOperationsRequest(**GOOD)

    assert parse_request(request.SerializeToString(), GetOperationsRequest) == request


def header(index: int, *, num_bytes: int, num_shares: int = 2) -> bytes:
    made = OperationShareHeader(index=index, num_shares=num_shares, num_bytes=num_bytes)
    return OperationChunk(header=made).SerializeToString()


def data_of(text: bytes) -> list[bytes]:
    return [*data_messages(memoryview(text), field=OperationChunk.DATA_FIELD_NUMBER)]


def test_shares_are_joined_from_their_messages() -> None:
    messages = [
        *(header(0, num_bytes=4), *data_of(b"ab"), *data_of(b"cd")),
        *(header(1, num_bytes=1), *data_of(b"e")),
    ]

    found = [(head.index, bytes(data)) for head, data in read_shares(messages)]

    assert found == [(0, b"abcd"), (1, b"e")]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "after 0 of all shares"),
        ([header(0, num_bytes=2), *data_of(b"ab")], "after 1 of 2 shares"),
        ([header(0, num_bytes=2, num_shares=1), *data_of(b"a")], "after 0 of 1 shares"),
        ([header(0, num_bytes=2), *data_of(b"abc")], "more than the 2 bytes"),
        (data_of(b"a"), "more than the 0 bytes"),
        ([header(1, num_bytes=2)], "share 1 came instead of share 0"),
        ([header(0, num_bytes=2), header(0, num_bytes=2)], "before the last byte"),
        ([b"\xff"], "no OperationChunk"),
    ],
)
def test_contradicting_messages_are_corrupt(messages: list[bytes], problem: str) -> None:
    with pytest.raises(CorruptRecordError, match=problem):
        list(read_shares(messages))
