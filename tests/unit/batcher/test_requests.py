"""Checks of calls, limits of requests for training calls, and the messages of an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from turnstream.errors import (
    ConflictError,
    FencedError,
    InvalidConfigError,
    StoreBehindError,
    UnknownFormatError,
)
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream.wire.v1.operations_pb2 import GetOperationsRequest
from turnstream_server.batcher.serving.get import (
    CHUNK_BYTES,
    check_caller,
    data_messages,
)
from turnstream_server.batcher.serving.requests import MAX_DP_WORLD_SIZE, parse_request, parse_token
from turnstream_server.ledger.core.frontier import Frontier
from turnstream_server.operations.log import MAX_SHARED

WITHDRAWN = Frontier(
    planned=2,
    stepped=2,
    committed=2,
    session_epoch=3,
    session="",
    dp_world_size=1,
    lineage="main",
    num_opened_groups=8,
    num_live_groups=8,
    is_closed=False,
)
"""A run whose session 2 ended with its plans, before another one."""


RESTARTED = replace(WITHDRAWN, session="next")
UNTRAINED = replace(WITHDRAWN, session_epoch=0, dp_world_size=0)


@pytest.mark.parametrize("session_epoch", [0, 2])
def test_rank_of_a_session_that_ended_with_its_plans_is_refused(session_epoch: int) -> None:
    request = wire.GetRequest(step=9, dp_world_size=1, session_epoch=session_epoch)
    request.previous_hash = "of a plan that is withdrawn"

    with pytest.raises(FencedError, match="payload was damaged and plans were withdrawn"):
        check_caller(request, WITHDRAWN)


def test_rank_of_a_lost_session_gets_what_the_store_has() -> None:
    request = wire.GetRequest(step=9, dp_world_size=1, session_epoch=4, previous_hash="of step 8")

    with pytest.raises(StoreBehindError, match=r"step 8 was delivered.*newest batch.*is 2"):
        check_caller(request, WITHDRAWN)


@pytest.mark.parametrize(
    ("session_epoch", "frontier", "words"),
    [
        (2, RESTARTED, "trainer session 2 has ended, 3 has begun"),
        (4, RESTARTED, "trainer session 4 was lost, the newest of the store is 3"),
        (4, WITHDRAWN, "trainer session 4 was lost, the newest of the store is 3"),
        (1, UNTRAINED, "trainer session 1 was lost, the newest of the store is 0"),
        (0, UNTRAINED, "a batch needs a trainer session, and the run has none yet"),
    ],
)
def test_rank_gets_the_name_of_the_newer_session(
    session_epoch: int, frontier: Frontier, words: str
) -> None:
    request = wire.GetRequest(step=3, dp_world_size=1, session_epoch=session_epoch)

    with pytest.raises(FencedError, match=words):
        check_caller(request, frontier)


def test_rank_of_another_world_size_is_refused() -> None:
    request = wire.GetRequest(step=3, dp_world_size=3, session_epoch=3)

    with pytest.raises(ConflictError, match="the session has 1 ranks, not 3"):
        check_caller(request, RESTARTED)


def test_token_of_a_newer_release_is_refused_as_such() -> None:
    with pytest.raises(UnknownFormatError, match=r"recovery token was written by a newer release"):
        parse_token("v2:main:7:ab12")


def test_data_messages_are_those_of_protobuf_and_join_to_the_whole():
    data = b"abcdefgh" * (CHUNK_BYTES // 4) + b"rest"

    messages = list(data_messages(memoryview(data)))

    chunks = [wire.GetChunk.FromString(message).data for message in messages]
    assert messages == [wire.GetChunk(data=chunk).SerializeToString() for chunk in chunks]
    assert [len(chunk) for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 4]
    assert b"".join(chunks) == data


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
    "reads_xxh3": (),
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
