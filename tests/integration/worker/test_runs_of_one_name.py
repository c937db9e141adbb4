"""Streams of a run that is deleted, and of the next run of its name: real batcher, real gRPC."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

import testkit
from harness.stored import content_of
from turnstream.errors import (
    FencedError,
    ObserverExpiredError,
    RunNotFoundError,
    StoreBehindError,
)
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.run.runs import create_run
from turnstream.worker import BatchStream, ObserverStream
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.admin.deletion import delete_run
from turnstream_server.ledger.core.frontier import read_frontier

pytestmark = [pytest.mark.grpc, pytest.mark.redis]

REFUSALS = (RunNotFoundError, FencedError, StoreBehindError)

_names = (f"lab {number}" for number in itertools.count(1))


@pytest.fixture
def name(client: redis.Redis) -> str:
    name = next(_names)
    create(client, name)
    return name


def create(client: redis.Redis, name: str, *, batch_groups: int = 1) -> None:
    create_run(client, name, replace(testkit.config(batch_groups), max_staleness=100))


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
    server: EmbeddedServer,
    client: redis.Redis,
    start_batcher: Any,
    name: str,
    call: str,
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
    server: EmbeddedServer,
    client: redis.Redis,
    start_batcher: Any,
    name: str,
    call: str,
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
