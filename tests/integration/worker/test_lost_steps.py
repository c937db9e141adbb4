"""Streams of a store that has lost steps, of a deleted run, and of the next run of its name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

import testkit
from harness.stored import content_of
from testkit import wait_until
from turnstream.errors import (
    ConflictError,
    FencedError,
    NotReadyError,
    ObserverExpiredError,
    RunNotFoundError,
    StoreBehindError,
    StoreUnavailableError,
)
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.run.runs import create_run
from turnstream.worker import BatchStream, _prefetch
from turnstream.worker.observer import ObserverStream
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.admin.deletion import delete_run
from turnstream_server.ledger.core.frontier import read_frontier

pytestmark = [pytest.mark.grpc, pytest.mark.redis]

RUN = "run"
LOST_AT_3 = (
    "the store has lost run 'run', or it was deleted: "
    "this trainer had stepped to 3 and committed 2$"
)

TOKEN = "v1:main:3:cccccccc"

PastOf = Callable[[EmbeddedServer], Any]


def pulled(batcher: Any, num_steps: int) -> BatchStream:
    batcher.needs_stepped = False
    for step in range(1, num_steps + 2):
        batcher.add_step(step, "abC")
    stream = BatchStream(batcher.target, RUN, timeout_s=60.0)
    for _ in range(num_steps):
        next(stream)
        stream.stepped()
    next(stream)
    batcher.calls.clear()
    return stream


@pytest.mark.parametrize(
    ("call", "num_refusals", "expected"),
    [
        ("stepped", 2, [4, 3, 2, 3, 4]),
        ("stepped", 3, [4, 3, 2, 1, 2, 3, 4]),
        ("committed", 1, [TOKEN, 3, TOKEN]),
    ],
)
def test_acknowledgement_repeats_lost_steps_first(
    batcher: Any, call: str, num_refusals: int, expected: list[object]
) -> None:
    with pulled(batcher, 3) as stream:
        batcher.refusals = [ConflictError("it does not follow")] * num_refusals

        getattr(stream, call)(*([TOKEN] if call == "committed" else []))

    assert [each[1] for each in batcher.calls if each[0] != "Get"] == expected


@pytest.mark.parametrize("is_outdated", [False, True])
def test_lost_announcement_is_repeated_after_the_lost_steps(
    batcher: Any, is_outdated: bool
) -> None:
    lost = ConflictError("it does not follow")
    with pulled(batcher, 2) as stream:
        stream.announce_version(7)
        batcher.refusals = [lost, lost]
        if is_outdated:  # another thread has announced a version above it
            batcher.refusals += [None, None, ConflictError("version 7 is not above 8")]

        stream.stepped()

    calls = [each for each in batcher.calls if each[0] != "Get"]
    assert calls[0] == calls[-2] == ("Announce", 7, 2, "")


def test_conflict_with_another_reason_is_raised(batcher: Any) -> None:
    with pulled(batcher, 2) as stream:
        batcher.refusals = [ConflictError(f"conflict {number}") for number in range(10)]

        with pytest.raises(ConflictError):
            stream.stepped()


def test_waiting_trainer_gets_an_error_for_a_lost_step(
    batcher: Any, retried: Callable[..., Any]
) -> None:
    batcher.add_step(1, "abC")

    with BatchStream(batcher.target, RUN, timeout_s=2.0) as stream:
        retried(lambda: next(stream))
        stream.stepped()
        batcher.refusals = [StoreBehindError("the newest batch of this store is 0")]

        with pytest.raises(StoreBehindError):
            retried(lambda: next(stream))


@pytest.fixture
def gone(failing: Any) -> Any:
    return failing(RunNotFoundError("no run named 'run'"))


@pytest.mark.parametrize("call", ["stepped", "committed", "announce_version", "__next__"])
def test_lost_run_error_names_the_progress_of_the_trainer(
    batcher: Any, gone: Any, call: str
) -> None:
    if call == "__next__":
        batcher.faults = [None, None, None, None, gone]
    with pulled(batcher, 3) as stream:
        stream.committed("v1:main:2:cccccccc")
        if call != "__next__":
            batcher.refusals = [RunNotFoundError("no run named 'run'")]
        arguments = {"committed": (TOKEN,), "announce_version": (9,)}

        with pytest.raises(StoreBehindError, match=LOST_AT_3) as caught:
            getattr(stream, call)(*arguments.get(call, ()))

    assert isinstance(caught.value.__cause__, RunNotFoundError)


def test_lost_run_error_names_the_checkpoint_of_a_resumed_trainer(batcher: Any, gone: Any) -> None:
    batcher.faults = [gone]
    stream = BatchStream(batcher.target, RUN, recovery_token="v1:main:2:cccccccc")
    lost = "this trainer had stepped to 2 and committed 2$"

    with stream, pytest.raises(StoreBehindError, match=lost):
        next(stream)
    batcher.faults = [gone]
    with BatchStream(batcher.target, RUN) as fresh, pytest.raises(RunNotFoundError):
        next(fresh)


def test_waits_at_first_and_after_a_failure_are_short(batcher: Any, failing: Any) -> None:
    # The batcher soon says what it waits for. A restarted store may have lost a step.
    errors = [NotReadyError("no batch"), StoreUnavailableError("loading")]
    batcher.faults = [failing(each) for each in errors]

    with BatchStream(batcher.target, RUN, timeout_s=60.0):
        wait_until(lambda: len(batcher.gets) == 4, describe="four calls")

    assert [request.wait_s for request in batcher.gets] == [1.0, 15.0, 1.0, 15.0]


def test_step_that_is_not_ready_is_asked_for_again_without_a_pause(
    batcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[Exception]()

    def retry_delay_s(error: Exception, *, num_failures: int) -> float:
        refused.append(error)
        return 0.05 * num_failures

    monkeypatch.setattr(_prefetch, "retry_delay_s", retry_delay_s)
    with BatchStream(batcher.target, RUN, timeout_s=60.0):
        wait_until(lambda: len(batcher.gets) == 2, describe="two calls")

    assert refused == []


# ------------------------------------------------------------------- the batcher itself


def test_waiting_trainer_continues_after_the_store_lost_its_step(
    server: EmbeddedServer, client: redis.Redis, start_batcher: Any, past_of: PastOf
) -> None:
    create(client, RUN, max_planned_ahead=0)
    target = start_batcher().target
    publish(server.url, RUN, "g0")

    with BatchStream(target, RUN) as stream:
        first = next(stream)
        past = past_of(server)
        token = stream.stepped()
        past.come_back()
        publish(server.url, RUN, "g1")
        second = next(stream)
        again = stream.stepped()

    assert [first.info.step, second.info.step] == [1, 2]
    assert (token.step, again.step) == (1, 2)
    assert read_frontier(client, RUN).stepped == 2


# ------------------------------------------------------------------ runs of one name

REFUSALS = (RunNotFoundError, FencedError, StoreBehindError)

_names = (f"lab {number}" for number in itertools.count(1))


@pytest.fixture
def name(client: redis.Redis) -> str:
    name = next(_names)
    create(client, name)
    return name


def create(client: redis.Redis, name: str, *, batch_groups: int = 1, **fields: Any) -> None:
    config = replace(testkit.config(batch_groups), max_staleness=100, **fields)
    create_run(client, name, config)


def publish(url: str, name: str, *group_ids: str) -> None:
    with Publisher(url, name) as publisher:
        for group_id in group_ids:
            publisher.publish(testkit.group(group_id)).result(10)


def state_of(client: redis.Redis, run: str) -> dict[str, Any]:
    """The keys of a run that trainers write to, and how far they are."""
    names = keys.run_keys(run)
    wanted = (names.batches, names.sessions, names.ranks, names.times, names.versions)
    written = {key: content_of(client, key) for key in wanted if client.exists(key)}
    frontier = read_frontier(client, run)
    return {**written, "frontier": (frontier.session_epoch, frontier.stepped, frontier.committed)}


@pytest.mark.parametrize("call", ["next", "stepped", "committed", "announce_version"])
def test_old_trainer_session_is_refused_and_the_next_run_stays_untouched(
    server: EmbeddedServer, client: redis.Redis, start_batcher: Any, name: str, call: str
) -> None:
    publish(server.url, name, "a", "b")
    target = start_batcher().target
    with BatchStream(target, name, timeout_s=20) as stream:
        next(stream)
        token = stream.stepped() if call == "committed" else None
        delete_run(client, name)
        create(client, name, batch_groups=3)
        publish(server.url, name, "a")
        before = state_of(client, f"{name}~2")
        calls: dict[str, Callable[[], object]] = {
            "next": lambda: [*stream],
            "stepped": stream.stepped,
            "committed": lambda: stream.committed(str(token)),
            "announce_version": lambda: stream.announce_version(1),
        }

        with pytest.raises(REFUSALS, match="deleted"):
            calls[call]()

        assert state_of(client, f"{name}~2") == before


@pytest.mark.parametrize("call", ["next", "seen"])
def test_old_observer_is_refused_by_the_next_run(
    server: EmbeddedServer, client: redis.Redis, start_batcher: Any, name: str, call: str
) -> None:
    publish(server.url, name, "a")
    target = start_batcher().target
    with ObserverStream(target, name, "audit", first_step=1, timeout_s=20) as stream:
        next(stream)
        delete_run(client, name)
        create(client, name)
        publish(server.url, name, "a")

        with pytest.raises((RunNotFoundError, ObserverExpiredError)):
            next(stream) if call == "next" else stream.seen()

    assert not client.exists(keys.run_keys(f"{name}~2").observers)
