"""Limits of the requests for training calls."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream.errors import InvalidConfigError
from turnstream.wire.v1.operations_pb2 import GetOperationsRequest
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
