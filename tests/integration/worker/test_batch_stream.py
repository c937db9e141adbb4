from __future__ import annotations

import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import testkit
from turnstream.errors import (
    BatcherUnavailableError,
    InvalidConfigError,
    NotReadyError,
    RejectedError,
    RunNotFoundError,
    StoreUnavailableError,
    WaitReason,
)
from turnstream.types import RecoveryToken
from turnstream.worker import BatchStream

pytestmark = pytest.mark.grpc

LONGEST_S = 10.0
"""Far above a woken wait on a busy machine, and below its full length."""


def test_stream_begins_after_the_recovery_token(batcher: Any) -> None:
    batcher.needs_stepped = False
    batcher.add_step(6, "abC")
    token = RecoveryToken(lineage="main", step=5, chain_hash="ab")

    with batcher.stream(recovery_token=token) as stream:
        assert next(stream).info.step == 6
        assert stream.config == testkit.config(4)
        assert stream.newest_version == 3


def test_stream_refuses_impossible_ranks_and_sessions(batcher: Any) -> None:
    with pytest.raises(InvalidConfigError, match="session"):
        batcher.stream(dp_world_size=2)
    with pytest.raises(InvalidConfigError, match="dp_rank"):
        batcher.stream(dp_rank=1)


def test_refused_start_is_raised_and_leaves_no_thread(batcher: Any) -> None:
    batcher.refusals = [RunNotFoundError("no run 'run'")]

    with pytest.raises(RunNotFoundError, match="no run"):
        batcher.stream()
    assert prefetch_threads() == []


# --------------------------------------------------------------------- acknowledging


def test_stepped_is_refused_before_the_last_mini_batch_and_when_repeated(batcher: Any) -> None:
    batcher.add_step(1, "abC", num_mini_batches=2)

    with batcher.stream() as stream:
        with pytest.raises(RejectedError, match="last mini-batch"):
            stream.stepped()
        next(stream)
        with pytest.raises(RejectedError, match="last mini-batch"):
            stream.stepped()
        next(stream)
        stream.stepped()
        with pytest.raises(RejectedError, match="acknowledged step is 1"):
            stream.stepped()


def test_version_is_refused_on_other_ranks(batcher: Any) -> None:
    with (
        batcher.stream(dp_rank=1, dp_world_size=2, session="s") as stream,
        pytest.raises(RejectedError, match="dp_rank 0 alone"),
    ):
        stream.announce_version(4)


def test_version_is_announced_for_the_last_stepped_step(batcher: Any) -> None:
    batcher.add_step(1, "abC")

    with batcher.stream() as stream:
        stream.announce_version(4)
        next(stream)
        stream.stepped()
        stream.announce_version(5, weights_uri="file:///weights/5")

        assert stream.newest_version == 5

    announced = [call for call in batcher.calls if call[0] == "Announce"]
    assert announced == [("Announce", 4, 0, ""), ("Announce", 5, 1, "file:///weights/5")]


@pytest.mark.parametrize(
    "refusal", [StoreUnavailableError("loading"), RejectedError("too fast", 0.05)]
)
def test_stepped_is_retried_after_a_temporary_refusal(batcher: Any, refusal: Exception) -> None:
    batcher.add_step(1, "abC")

    with batcher.stream() as stream:
        next(stream)
        batcher.refusals = [refusal, refusal]
        assert stream.stepped().step == 1

    assert [call[0] for call in batcher.calls].count("Stepped") == 3


# --------------------------------------------------------------------- waiting


def test_wait_ends_at_its_deadline_with_the_batchers_reason(batcher: Any, retried: Any) -> None:
    with retried(lambda: batcher.stream(timeout_s=0.4)) as stream:
        testkit.wait_until(lambda: batcher.calls.count(("Get", 1)) > 1)  # the first was answered
        found = testkit.wait_until(lambda: not_ready(stream), describe="its reason")

    assert found is not None
    error, waited_s = found
    assert 0.4 <= waited_s < LONGEST_S
    assert "group g7 of step 1 is open" in str(error)
    assert error.reasons[1:] == (WaitReason("member_open", "sample 3", {"sample": 3}),)


def not_ready(stream: BatchStream) -> tuple[NotReadyError, float] | None:
    started_s = time.monotonic()
    try:
        next(stream)
    except BatcherUnavailableError:
        return None
    except NotReadyError as error:
        return error, time.monotonic() - started_s
    raise AssertionError("there is no batch")


def test_long_poll_that_ends_at_once_causes_no_busy_loop(
    batcher: Any, retried: Any, failing: Any
) -> None:
    batcher.faults = [failing(NotReadyError("no"))] * 1000

    started_s = time.monotonic()
    with (
        retried(lambda: batcher.stream(timeout_s=1.0)) as stream,
        pytest.raises((NotReadyError, BatcherUnavailableError)),
    ):
        next(stream)

    assert len(batcher.calls) < 12 * (time.monotonic() - started_s)


def test_prefetch_is_bounded_in_bytes(batcher: Any) -> None:
    batcher.needs_stepped = False
    for step in range(1, 7):
        batcher.add_step(step, "abC")
    with batcher.stream() as stream:
        num_bytes = next(stream).num_bytes

    with batcher.stream(max_prefetch_bytes=2 * num_bytes + 10) as stream:
        testkit.wait_until(lambda: stream.statistics().queued_mini_batches == 2)
        with pytest.raises(TimeoutError):  # the third one comes as fast, and does not fit
            testkit.wait_until(lambda: stream.statistics().queued_bytes > 2 * num_bytes, 0.2)
        most = 0
        for step in range(1, 7):
            most = max(most, stream.statistics().queued_bytes)
            assert next(stream).info.step == step

    assert most == 2 * num_bytes


def test_close_cancels_a_waiting_get_and_wakes_its_reader(batcher: Any) -> None:
    batcher.add_step(1, "abC")
    batcher.add_step(2, "abD")
    stream = batcher.stream(timeout_s=600.0)  # the Get would last for as long as any may
    next(stream)
    testkit.wait_until(lambda: ("Get", 2) in batcher.calls)

    started_s = time.monotonic()
    with ThreadPoolExecutor() as pool:
        reader = pool.submit(next, stream)
        stream.close()
        stream.close()
        with pytest.raises(RejectedError, match="closed"):
            reader.result()

    assert time.monotonic() - started_s < LONGEST_S
    testkit.wait_until(lambda: batcher.num_open_gets == 0)
    assert prefetch_threads() == []


@pytest.mark.parametrize(
    ("end", "max_prefetch_bytes"),
    [(BatchStream.close, 1 << 30), (lambda stream: None, 1)],  # the thread waits for data, or space
    ids=["close", "drop"],
)
def test_closed_or_dropped_stream_leaves_no_thread_or_socket(
    batcher: Any, end: Any, max_prefetch_bytes: int
) -> None:
    batcher.add_step(1, "abC", num_mini_batches=4)
    threads, sockets = client_threads(), open_sockets()

    for _ in range(3):
        stream = batcher.stream(max_prefetch_bytes=max_prefetch_bytes)
        next(stream)
        end(stream)
        del stream
        gc.collect()

    assert prefetch_threads() == []
    testkit.wait_until(lambda: client_threads() <= threads, describe="threads to end")
    testkit.wait_until(lambda: open_sockets() <= sockets, describe="sockets to close")


def client_threads() -> int:
    return sum("ThreadPoolExecutor" not in thread.name for thread in threading.enumerate())


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "prefetch" in thread.name]


def open_sockets() -> int:
    folder = "/proc/self/fd"
    links = []
    for name in os.listdir(folder):
        try:
            links.append(os.readlink(f"{folder}/{name}"))
        except OSError:
            continue
    return sum(link.startswith("socket:") for link in links)


# --------------------------------------------------------------------- addresses

WRONG = {
    "redis://localhost:7379": "is the address of a store, not of a batcher: write HOST:PORT",
    "localhost": "has no port: write HOST:PORT, such as 127.0.0.1:7600",
    "http://localhost:7600": "has no port: write HOST:PORT",
    "": "has an empty address: write HOST:PORT",
    "one:7600,two": "has no port: write HOST:PORT",
}


@pytest.mark.parametrize("target", WRONG)
def test_wrong_batcher_address_names_the_expected_form(target: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        BatchStream(target, "maze")

    assert str(caught.value).startswith("target: ")
    assert WRONG[target] in str(caught.value)
