"""Checks of a call, and the messages of its answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from turnstream.errors import FencedError, StoreBehindError, UnknownFormatError
from turnstream.records.batches import EncodedMiniBatch
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.serving.get import (
    CHUNK_BYTES,
    check_caller,
    data_messages,
    header_message,
)
from turnstream_server.batcher.serving.requests import parse_token
from turnstream_server.bus.core.frontier import Frontier

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


def test_rank_gets_the_name_of_the_newer_session() -> None:
    request = wire.GetRequest(step=3, dp_world_size=1, session_epoch=2)

    with pytest.raises(FencedError, match="trainer session 2 has ended, the current one is 3"):
        check_caller(request, replace(WITHDRAWN, session="next"))


def test_token_of_a_newer_release_is_refused_as_such() -> None:
    with pytest.raises(UnknownFormatError, match=r"recovery token was written by a newer release"):
        parse_token("v2:main:7:ab12")


def test_a_data_message_is_the_very_bytes_that_protobuf_would_write():
    data = bytes(range(256)) * 3

    messages = list(data_messages(memoryview(data)))

    assert messages == [wire.GetChunk(data=data).SerializeToString()]


def test_data_is_cut_into_chunks_that_join_to_the_whole():
    data = b"abcdefgh" * (CHUNK_BYTES // 4) + b"rest"

    chunks = [wire.GetChunk.FromString(m).data for m in data_messages(memoryview(data))]

    assert [len(chunk) for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 4]
    assert b"".join(chunks) == data


def test_the_header_names_the_mini_batch_and_what_will_come():
    share = EncodedMiniBatch(data=memoryview(b"12345"), content_hash="ab", num_bytes=5)

    message = header_message(share, step=7, mini_batch=1, num_mini_batches=2)

    assert wire.GetChunk.FromString(message).header == wire.MiniBatchHeader(
        step=7, mini_batch=1, num_mini_batches=2, num_bytes=5, content_hash="ab"
    )
