"""Observers beside a trainer, on the batcher itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

import testkit
from turnstream.errors import (
    BatcherUnavailableError,
    EndOfRunError,
    InvalidConfigError,
    NotReadyError,
    ObserverExpiredError,
    RejectedError,
)
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.run.runs import close_run
from turnstream.worker import BatchStream
from turnstream.worker.observer import ObserverStream
from turnstream_server.ledger.core.frontier import read_frontier

pytestmark = [pytest.mark.grpc, pytest.mark.redis]

NewRun = Callable[..., str]
_numbers = itertools.count(1)


@pytest.fixture
def run(client: redis.Redis, new_run: NewRun) -> str:
    return new_run(client, batch_groups=1, max_staleness=100, max_planned_ahead=3)


@pytest.fixture
def publish(server: Any, run: str) -> Iterator[Callable[..., None]]:
    """`publish(num_groups)` sends groups of two trajectories."""
    with Publisher(server.url, run) as publisher:

        def send(num_groups: int) -> None:
            for _ in range(num_groups):
                publisher.publish(testkit.group(f"g{next(_numbers)}")).result(10)

        yield send


def test_observer_sees_the_trainers_batches_and_changes_nothing(
    start_batcher: Any, client: redis.Redis, run: str, publish: Any
) -> None:
    publish(3)
    target = start_batcher().target

    with (
        BatchStream(target, run) as trainer,
        ObserverStream(target, run, "audit", first_step=1) as observer,
    ):
        observed = [next(observer).content_hash for _ in range(3)]
        before = read_frontier(client, run)
        epoch = before.session_epoch
        trained = [next(trainer).content_hash]
        trainer.stepped()
        trained += [next(trainer).content_hash for _ in range(2)]

    after = read_frontier(client, run)
    assert observed == trained
    assert (before.stepped, before.committed) == (0, 0)
    assert (after.stepped, after.session_epoch) == (1, epoch)


def test_observer_may_have_other_ranks_than_the_trainer(
    start_batcher: Any, run: str, publish: Any
) -> None:
    publish(1)
    target = start_batcher().target

    with (
        BatchStream(target, run) as trainer,
        ObserverStream(target, run, "o", 0, 2, first_step=1) as first,
        ObserverStream(target, run, "o", 1, 2, first_step=1) as second,
    ):
        whole = next(trainer).rows.row_id.tolist()
        shares = [next(first).rows.row_id.tolist(), next(second).rows.row_id.tolist()]

    assert sorted(itertools.chain(*shares)) == sorted(whole)


def test_observer_resumes_at_the_first_unseen_batch(
    start_batcher: Any, run: str, publish: Any
) -> None:
    publish(3)
    target = start_batcher().target

    with ObserverStream(target, run, "o", first_step=1) as observer:
        next(observer)
        acknowledged = observer.seen()
        next(observer)  # looked at, and not acknowledged
    with ObserverStream(target, run, "o") as again:
        next_step = next(again).info.step

    assert (acknowledged, next_step) == (1, 2)


@pytest.mark.parametrize(("leftover", "steps"), [("short", 2), ("carry", 1), ("drop", 1)])
def test_observer_ends_with_the_run_for_every_leftover(
    start_batcher: Any, server: Any, client: redis.Redis, new_run: NewRun, leftover: Any, steps: int
) -> None:
    run = new_run(client, batch_groups=2, max_staleness=100, max_planned_ahead=3)
    with Publisher(server.url, run) as publisher:
        for _ in range(3):
            publisher.publish(testkit.group(f"g{next(_numbers)}")).result(10)
    close_run(client, run, leftover=leftover)
    target = start_batcher().target

    with BatchStream(target, run) as trainer, ObserverStream(target, run, "o") as observer:
        for _ in trainer:
            trainer.stepped()
        seen = [mini_batch.info.step for mini_batch in observer]
        with pytest.raises(StopIteration) as caught:
            next(observer)

    assert seen == list(range(1, steps + 1))
    assert isinstance(caught.value.__context__, EndOfRunError)


def test_waiting_observer_does_not_expire(
    start_batcher: Any, retried: Any, client: redis.Redis, run: str, publish: Any
) -> None:
    name, target = keys.run_keys(run).observers, start_batcher().target

    def expires_ms() -> int:
        entry: Any = client.hget(name, "o")
        return int(entry.split(b":")[1])

    with retried(lambda: ObserverStream(target, run, "o", timeout_s=2.0)) as observer:
        declared_ms = expires_ms()
        with pytest.raises((NotReadyError, BatcherUnavailableError), match="step 1"):
            next(observer)
        testkit.wait_until(lambda: expires_ms() > declared_ms + 100)
        publish(1)

        assert retried(lambda: next(observer)).info.step == 1


def test_expired_observer_gets_an_error(
    start_batcher: Any, client: redis.Redis, run: str, publish: Any
) -> None:
    target = start_batcher().target

    with ObserverStream(target, run, "o", expiry_s=600, timeout_s=10) as observer:
        client.hset(keys.run_keys(run).observers, "o", "0:0:600000")
        publish(1)

        with pytest.raises(ObserverExpiredError, match="silent for more than 600 s"):
            list(observer)


def test_resumed_expired_observer_gets_the_missed_steps(
    start_batcher: Any,
    client: redis.Redis,
    run: str,
    publish: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # It was given step 4 behind step 1, without a word.
    publish(4)
    target = start_batcher().target
    with ObserverStream(target, run, "o", first_step=1) as observer:
        next(observer)
        observer.seen()
        assert not observer.missed
    client.hset(keys.run_keys(run).observers, "o", "1:0:600000")
    with BatchStream(target, run) as trainer:
        for _ in range(3):
            next(trainer)
            trainer.stepped()

    with ObserverStream(target, run, "o") as again, ObserverStream(target, run, "new") as new:
        step = next(again).info.step
        again.seen()
    with ObserverStream(target, run, "o") as resumed:
        assert not resumed.missed

    assert (again.missed, step, len(new.missed)) == (range(2, 4), 4, 0)
    warnings = [each.message for each in caplog.records if "misses" in each.message]
    assert warnings == [f"observer 'o' of run {run} expired, and misses the steps 2 to 3"]


def test_seen_is_refused_before_the_last_mini_batch_and_on_other_ranks(
    start_batcher: Any, run: str, publish: Any
) -> None:
    publish(1)
    target = start_batcher().target

    with ObserverStream(target, run, "o") as observer:
        with pytest.raises(RejectedError, match=r"seen\(\) is for a batch"):
            observer.seen()
        next(observer)
        observer.seen()
        with pytest.raises(RejectedError, match="last acknowledged step is 1"):
            observer.seen()
    with (
        ObserverStream(target, run, "o", 1, 2, first_step=1) as second,
        pytest.raises(RejectedError, match="dp_rank 0 alone"),
    ):
        second.seen()


def test_observer_refuses_impossible_arguments(start_batcher: Any, run: str) -> None:
    with pytest.raises(InvalidConfigError, match="dp_rank"):
        ObserverStream(start_batcher().target, run, "o", 2, 2)
    with pytest.raises(InvalidConfigError, match="first_step"):
        ObserverStream(start_batcher().target, run, "o", first_step=0)
    with pytest.raises(InvalidConfigError, match="expiry_s"):
        ObserverStream(start_batcher().target, run, "o", expiry_s=9.9)
    with pytest.raises(InvalidConfigError, match="observer"):
        ObserverStream(start_batcher().target, run, "")
