"""A store or a batcher that is stopped keeps its connections and says nothing.

Every wait of a worker ends by its deadline all the same, and says which of the two it is.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis

from testkit import config, group, wait_until
from testkit.services.processes import batcher_process, frozen
from turnstream.errors import StoreUnavailableError, UnavailableError, WaitKind
from turnstream.generator import Publisher
from turnstream.records.statuses import error_to_status
from turnstream.store.client.addresses import address_of
from turnstream.store.run.runs import create_run
from turnstream.store.waits.awaited import store_away
from turnstream.worker import BatchStream
from turnstream.worker.observer import ObserverStream
from turnstream_server.batcher.serving import running_calls
from turnstream_server.embedded import EmbeddedServer

pytestmark = [pytest.mark.grpc, pytest.mark.redis]

TIMEOUT_S = 2.0
LONGEST_S = 20.0
"""Far above the deadline, on a machine that is busy, and far below the sockets' own timeouts."""
RUN = "frozen"


def ended(call: Callable[[], object]) -> UnavailableError:
    began_s = time.monotonic()
    with pytest.raises(UnavailableError) as caught:
        call()
    assert time.monotonic() - began_s < LONGEST_S
    return caught.value


def awaited(call: Callable[[], object], expected: Sequence[WaitKind]) -> UnavailableError:
    """Return the error of the first wait with these reasons; each wait ends soon.

    A wait just after an answer has the reason of that answer, and the last attempt of a call may be
    too short for one.
    """

    def has_reasons() -> UnavailableError | None:
        error = ended(call)
        return error if kinds(error)[: len(expected)] == [*expected] else None

    error = wait_until(has_reasons, describe=f"a wait that says {expected}")
    assert error is not None
    return error


def all_awaited(
    waits: Sequence[tuple[Callable[[], object], Sequence[WaitKind]]],
) -> list[UnavailableError]:
    with ThreadPoolExecutor(len(waits)) as pool:
        return [each.result() for each in [pool.submit(awaited, *wait) for wait in waits]]


def kinds(error: UnavailableError) -> list[str]:
    return [reason.kind for reason in error.reasons]


@pytest.fixture
def url(server: EmbeddedServer, client: redis.Redis) -> str:
    create_run(client, RUN, config(batch_groups=1, mini_batch_groups=1))
    with Publisher(server.url, RUN) as publisher:
        publisher.publish(group("a")).result(10)
    return server.url


@pytest.fixture
def process(url: str, tmp_path: Path) -> Iterator[tuple[int, str]]:
    with batcher_process(url, tmp_path / "address") as started:
        yield started


def test_waits_of_a_trainer_name_a_silent_store(
    server: EmbeddedServer,
    url: str,
    start_batcher: Callable[[], Any],
    retried: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The batcher answers long before the trainer reports it as silent.
    monkeypatch.setattr(running_calls, "_ANSWER_SHARE", 0.6)
    target = start_batcher().target
    with retried(lambda: BatchStream(target, RUN, timeout_s=TIMEOUT_S)) as stream:
        retried(lambda: next(stream))

        with frozen(server.pid):
            stepped, batch = all_awaited(
                [
                    (stream.stepped, (WaitKind.NOT_ACKNOWLEDGED, WaitKind.STORE_AWAY)),
                    (lambda: next(stream), (WaitKind.NOT_READY, WaitKind.STORE_AWAY)),
                ]
            )

    assert stepped.reasons[0].facts["call"] == "step 1 as stepped"
    assert batch.reasons[0].facts == {
        "awaited": "batch",
        "run": RUN,
        "step": 2,
        "waited_s": TIMEOUT_S,
    }
    for error in (stepped, batch):
        assert error.reasons[1].facts["address"] == address_of(url)


def test_waits_of_a_worker_name_a_silent_batcher(
    url: str, process: tuple[int, str], retried: Callable[..., Any]
) -> None:
    pid, target = process
    with BatchStream(target, RUN) as first:
        next(first)  # later streams get the planned batch at once
    with (
        retried(lambda: BatchStream(target, RUN, timeout_s=TIMEOUT_S / 2)) as stream,
        retried(lambda: ObserverStream(target, RUN, "logger", timeout_s=TIMEOUT_S / 2)) as observer,
    ):
        retried(lambda: next(stream))
        retried(lambda: next(observer))
        calls: dict[str, Callable[[], object]] = {
            "step 1 as stepped": stream.stepped,
            "the checkpoint v1:main:0:": lambda: stream.committed("v1:main:0:"),
            "policy version 5": lambda: stream.announce_version(5),
            "step 1 as seen": observer.seen,
            "the beginning of a trainer session": lambda: BatchStream(
                target, RUN, timeout_s=TIMEOUT_S / 2
            ),
        }

        silent = (WaitKind.NOT_ACKNOWLEDGED, WaitKind.BATCHER_AWAY)
        with frozen(pid):
            _, *found = all_awaited(
                [
                    (lambda: next(stream), (WaitKind.NOT_READY, WaitKind.BATCHER_AWAY)),
                    *((call, silent) for call in calls.values()),
                ]
            )
            began_s = time.monotonic()
            stream.close()
            observer.close()
            assert time.monotonic() - began_s < LONGEST_S
    errors = dict(zip(calls, found, strict=True))

    for what, error in errors.items():
        assert kinds(error) == [*silent]
        assert error.reasons[0].facts["call"] == what
        assert error.reasons[1].facts["address"] == target


@pytest.mark.parametrize(
    ("answers_after_s", "kind"), [(1.6, WaitKind.STORE_AWAY), (0.2, WaitKind.BATCHER_AWAY)]
)
def test_short_last_attempt_does_not_replace_an_earlier_reason(
    batcher: Any,
    retried: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    answers_after_s: float,
    kind: WaitKind,
) -> None:
    # A batcher that had just reported a silent store was itself reported as silent.
    store_is_silent = StoreUnavailableError("", [store_away(address="here", since_s=7.0)])
    num_calls, may_end = itertools.count(1), threading.Event()

    def refuse(context: Any) -> None:
        if next(num_calls) == 1:
            may_end.wait(answers_after_s)
            code, details = error_to_status(store_is_silent)
            context.abort(grpc.StatusCode[code], details)
        may_end.wait(60)

    batcher.add_step(1, "abC")
    with retried(lambda: BatchStream(batcher.target, "run", timeout_s=2.0)) as stream:
        retried(lambda: next(stream))
        monkeypatch.setattr(batcher, "_refuse", refuse)
        stepped = ended(stream.stepped)
        may_end.set()

    assert kinds(stepped) == [WaitKind.NOT_ACKNOWLEDGED, kind]
    call, silence = (dict[str, Any](reason.facts) for reason in stepped.reasons)
    # A silence of the batcher counts from its last answer.
    assert silence["since_s"] == 7.0 or silence["since_s"] < call["waited_s"] - 0.1
