"""Faults between a batcher and the stream."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import testkit
import turnstream
from harness.proxy import Proxy
from turnstream.errors import (
    BatcherUnavailableError,
    BatchingError,
    ConflictError,
    CorruptRecordError,
    FencedError,
    RejectedError,
    ReleasedError,
    StoreBehindError,
    TurnstreamError,
)
from turnstream.generator import Publisher
from turnstream.types import Denominators
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream.worker import BatchStream, _replicas
from turnstream.worker._prefetch import StreamStatistics
from turnstream_server.batcher.serving import get

pytestmark = pytest.mark.grpc


def texts(mini_batch: Any) -> list[str]:
    return testkit.spell(mini_batch.rows)


def test_missing_batcher_is_reported_at_the_deadline(batcher: Any, retried: Any) -> None:
    batcher.add_step(1, "abC")
    with retried(lambda: batcher.stream(timeout_s=2.0)) as stream:
        retried(lambda: next(stream))
        batcher.stop()
        calls = {"not_ready": lambda: next(stream), "not_acknowledged": stream.stepped}

        for kind, call in calls.items():
            with pytest.raises(BatcherUnavailableError) as caught:
                call()
            assert [each.kind for each in caught.value.reasons] == [kind, "batcher_away"]


@pytest.mark.parametrize("num_messages", [0, 1, 2, 5])
def test_interrupted_stream_is_fetched_again(batcher: Any, num_messages: int) -> None:
    batcher.add_step(1, "abCDEFG", num_mini_batches=2)
    batcher.faults = [cut_after(num_messages), aborted_after(num_messages)]

    with batcher.stream() as stream:
        seen = [next(stream), next(stream)]
        statistics = stream.statistics()

    assert [texts(mini_batch) for mini_batch in seen] == [["abCDEFG"]] * 2
    assert statistics.num_retries == 2
    assert statistics.num_damaged == 1  # an aborted call is not damage


def test_partly_received_step_names_its_manifest(batcher: Any) -> None:
    batcher.add_step(1, "abCDEFG", num_mini_batches=2)
    batcher.add_step(2, "abCDEFG")
    batcher.chunk_bytes = 1 << 20
    batcher.needs_stepped = False
    batcher.faults = [cut_after(1), cut_after(3)]  # in the first mini-batch, and in the second

    with batcher.stream() as stream:
        for _ in range(3):
            next(stream)
        testkit.wait_until(lambda: ("Get", 3) in batcher.calls, describe="the step after")

    named = [(request.manifest_hash, request.first_mini_batch) for request in batcher.gets]
    assert named == [("", 0), ("", 0), (f"{1:064}", 1), ("", 0), ("", 0)]


def test_repeated_get_brings_the_rest_alone(
    server: Any, start_batcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get, "CHUNK_BYTES", 1 << 14)
    with turnstream.connect(server.url) as service:
        service.create_run("run", batch_groups=2, mini_batch_groups=1)
    with Publisher(server.url, "run") as publisher:
        for name in "gh":
            long = testkit.trajectory(testkit.turn("a", "B" * 300_000))
            publisher.publish(testkit.group(name, long))

    with Proxy(start_batcher().target) as proxy:
        proxy.replies.is_recorded = True
        proxy.replies.bytes_per_s = 4e6  # gRPC drops what the worker has not taken at a break
        proxy.break_replies([1_000_000] * 5)
        with BatchStream(proxy.address, "run", timeout_s=60.0) as stream:
            seen = [next(stream), next(stream)]
            num_damaged = stream.statistics().num_damaged

    num_bytes = sum(mini_batch.num_bytes for mini_batch in seen)
    assert (num_bytes > 2_800_000, proxy.num_breaks >= 3, num_damaged) == (True, True, 0)
    num_sent = sum(len(sent) for sent in proxy.replies.recorded)
    assert num_sent < 1.3 * num_bytes


def test_damaged_mini_batch_is_fetched_again(batcher: Any) -> None:
    batcher.chunk_bytes = 1 << 20
    batcher.add_step(1, "abCDEFG")
    batcher.faults = [damage("abcd"), damage("defg")]

    with batcher.stream() as stream:
        mini_batch = next(stream)
        statistics = stream.statistics()

    assert texts(mini_batch) == ["abCDEFG"]
    assert (statistics.num_damaged, statistics.num_mini_batches) == (2, 1)


def test_replicas_of_two_releases_send_one_step(batcher: Any) -> None:
    """An upgrade in the middle of a step: the hashes differ, the content does not."""

    def upgraded(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield from itertools.islice(messages, 3)
        batcher.is_older = False
        context.abort(grpc.StatusCode.UNAVAILABLE, "upgraded")

    batcher.chunk_bytes = 1 << 20
    batcher.add_step(1, "abCDEFG", num_mini_batches=2)
    batcher.is_older = True
    batcher.faults = [damage("abcd"), upgraded]

    with batcher.stream() as stream:
        seen = [next(stream), next(stream)]
        num_damaged = stream.statistics().num_damaged

    assert [texts(mini_batch) for mini_batch in seen] == [["abCDEFG"]] * 2
    assert [len(mini_batch.content_hash) for mini_batch in seen] == [64, 32]
    assert num_damaged == 1


def test_bytes_after_a_hole_are_fetched_again(batcher: Any) -> None:
    def from_byte(messages: Iterator[bytes], _: Any) -> Iterator[bytes]:
        chunk = wire.GetChunk.FromString(next(messages))
        chunk.header.first_byte = 600
        yield chunk.SerializeToString()
        yield from itertools.islice(messages, 2, None)

    batcher.add_step(1, "abCDEFG")
    batcher.faults = [from_byte, aborted_after(2), from_byte, aborted_after(3), from_byte]

    with batcher.stream() as stream:
        assert texts(next(stream)) == ["abCDEFG"]
        assert stream.statistics().num_damaged == 2

    # The first two replies from byte 600 were refused, as 0 and 300 bytes were here.
    assert [request.first_byte for request in batcher.gets][:5] == [0, 0, 300, 0, 600]


def test_rest_of_a_get_is_not_read_after_a_damaged_mini_batch(batcher: Any) -> None:
    numbers = iter(range(1_000))

    def damaged(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield from damage("abcd")(messages, context)
        for _ in numbers:
            yield wire.GetChunk(data=bytes(1 << 16)).SerializeToString()

    batcher.chunk_bytes = 1 << 20
    batcher.add_step(1, "abCDEFG")
    batcher.faults = [damaged]

    with batcher.stream() as stream:
        assert texts(next(stream)) == ["abCDEFG"]
        testkit.wait_until(lambda: batcher.num_open_gets <= 1, describe="the end of the first Get")

    assert next(numbers, None) is not None


def test_mini_batch_arrives_over_a_slow_link(batcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_replicas, "KEEPALIVE_WITHIN_S", 0.5)
    batcher.chunk_bytes = 1 << 18
    batcher.add_step(1, "ab" + "C" * 100_000)

    with Proxy(batcher.target) as proxy:
        proxy.replies.bytes_per_s = 3e5
        with BatchStream(proxy.address, "run", timeout_s=60.0) as stream:
            mini_batch = next(stream)

    assert mini_batch.num_bytes > 500_000  # above the limit for a ping at this rate
    assert len(batcher.gets) <= 4


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (lambda: damage("abc"), CorruptRecordError),
        (lambda: aborted_after(0, grpc.StatusCode.INTERNAL), TurnstreamError),
    ],
)
def test_repeated_failure_is_raised_after_3_attempts(batcher: Any, fault: Any, error: Any) -> None:
    batcher.chunk_bytes = 1 << 20
    batcher.add_step(1, "abC")
    batcher.faults = [fault()] * 10

    with batcher.stream() as stream:
        for _ in range(2):
            with pytest.raises(error):
                next(stream)

    assert batcher.calls.count(("Get", 1)) == 3


def test_occasional_damage_is_never_raised(batcher: Any) -> None:
    batcher.chunk_bytes = 1 << 20
    batcher.needs_stepped = False
    for step in (1, 2, 3):
        batcher.add_step(step, "abC")
    batcher.faults = [damage("abc"), damage("abc"), None] * 3

    with batcher.stream() as stream:
        seen = [next(stream).info.step for _ in range(3)]
        assert stream.statistics().num_damaged == 6

    assert seen == [1, 2, 3]


def test_stream_refuses_the_mini_batch_of_another_run(batcher: Any) -> None:
    batcher.add_step(1, "abC", run="other")

    with batcher.stream() as stream, pytest.raises(CorruptRecordError, match="other"):
        next(stream)


def test_stream_refuses_rows_beyond_the_shipped_denominators(batcher: Any) -> None:
    fewer = Denominators(1, 1, 1, 1, weight_sum=1.0, length_constant=0)
    batcher.add_step(1, "abCD", denominators=fewer)

    with batcher.stream() as stream, pytest.raises(BatchingError, match="num_tokens"):
        next(stream)

    assert batcher.calls.count(("Get", 1)) == 1


def test_stream_refuses_a_batch_that_changes_between_attempts(batcher: Any) -> None:
    batcher.add_step(1, "abCDEFG", num_mini_batches=2)
    batcher.chunk_bytes = 1 << 20
    batcher.faults = [aborted_after(3)]

    with batcher.stream(max_prefetch_bytes=1) as stream:
        testkit.wait_until(lambda: stream.statistics().queued_mini_batches == 1)
        batcher.add_step(1, "xyZ", num_mini_batches=2)
        next(stream)

        with pytest.raises(ConflictError, match="changed after it was used"):
            next(stream)


def test_queued_mini_batches_come_before_the_final_error(batcher: Any, failing: Any) -> None:
    batcher.add_step(1, "abC")
    batcher.faults = [None, failing(ReleasedError("step 2 is no longer retained"))]

    with batcher.stream() as stream:
        testkit.wait_until(lambda: ("Get", 2) in batcher.calls)
        assert texts(next(stream)) == ["abC"]
        for _ in range(2):
            with pytest.raises(ReleasedError, match="no longer retained"):
                next(stream)


@pytest.mark.parametrize("kind", [FencedError, StoreBehindError, ConflictError])
def test_queued_mini_batches_are_dropped_when_the_session_ends(
    batcher: Any, failing: Any, kind: type[RejectedError]
) -> None:
    batcher.add_step(1, "abC")
    batcher.faults = [None, failing(kind("the session is over"))]

    with batcher.stream() as stream:
        testkit.wait_until(lambda: _is_dropped(stream.statistics()), describe="the end")
        with pytest.raises(kind, match="is over"):
            next(stream)


def _is_dropped(found: StreamStatistics) -> bool:
    """Whether a mini-batch came, and neither it nor its bytes are queued."""
    queued = (found.queued_mini_batches, found.queued_bytes)
    return found.num_mini_batches == 1 and queued == (0, 0)


def test_silent_batcher_is_reported_at_the_deadline(batcher: Any) -> None:
    released = threading.Event()

    def silent(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield next(messages)
        released.wait(20)

    batcher.add_step(1, "abC")
    batcher.faults = [silent, silent]

    with batcher.stream(timeout_s=2.0) as stream:
        with pytest.raises(BatcherUnavailableError) as caught:
            next(stream)
        assert [reason.kind for reason in caught.value.reasons] == ["not_ready", "batcher_away"]
        assert texts(next(stream)) == ["abC"]  # the silent Get was ended and repeated
    released.set()


# --------------------------------------------------------------------- faults to order


def cut_after(num_messages: int) -> Any:
    """The call ends well, but too early."""
    return lambda messages, _: itertools.islice(messages, num_messages)


def aborted_after(num_messages: int, status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> Any:
    def fault(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield from itertools.islice(messages, num_messages)
        context.abort(status, "going away")

    return fault


def damage(letters: str) -> Any:
    """One bit of the first of these tokens."""
    needle = testkit.ids(letters).tobytes()

    def fault(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for sent in messages:
            yield sent.replace(needle, bytes([needle[0] ^ 0x10]) + needle[1:])

    return fault
