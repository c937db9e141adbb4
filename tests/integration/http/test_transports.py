"""The same calls over Redis and over HTTP: equal data, equal errors."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis

import turnstream
from testkit import group, ids
from testkit.batchers import BatcherThread
from testkit.gateway_thread import GatewayThread
from testkit.generator_calls import SETTINGS, operate, write_everything
from testkit.stores import RunReader
from turnstream import errors
from turnstream.errors import (
    ConflictError,
    CorruptRecordError,
    EndOfRunError,
    FencedError,
    GroupTooLargeError,
    InvalidConfigError,
    InvalidTurnError,
    NotReadyError,
    RunNotFoundError,
    TurnstreamError,
    UnknownFormatError,
)
from turnstream.generator import AsyncPublisher, Prompt
from turnstream.generator.transport import sender
from turnstream.records.configs import encode_config
from turnstream.store.client import keys
from turnstream.types import TrajectoryKey
from turnstream.wire.v1 import calls_pb2 as wire
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.admin.deletion import delete_run

pytestmark = pytest.mark.redis

ONE_GROUP: dict[str, Any] = {"batch_groups": 1, "max_staleness": 0, "max_planned_ahead": 0}


def stored(client: redis.Redis, run: str) -> dict[str, Any]:
    """Return what the store has of a run, without times."""
    reader = RunReader(client, run)
    names = reader.keys
    events: Any = client.xrange(names.events)
    payload = {name: reader.records(keys.parse_trajectory_id(name)) for name in reader.ledger()}
    return {
        "ledger": reader.ledger(),
        "counts": reader.counts(),
        "events": [fields for _, fields in events],
        "payload": payload,
        "groups": client.hgetall(names.groups),
        "held": client.hgetall(names.payload_bytes),
        "budget": client.hgetall(names.budget),
        "rewards": client.hgetall(names.rewards),
        "prompts": client.hgetall(names.prompts),
        "config": {k: v for k, v in _hash(client, names.config).items() if k != b"lease_floor"},
        "num_conflicts": client.hget(names.conflicts, "num"),
    }


def _hash(client: redis.Redis, name: str) -> dict[bytes, bytes]:
    found: Any = client.hgetall(name)
    return found


def test_same_calls_store_the_same_bytes(
    client: redis.Redis, url_of: Callable[[str], str], new_name: str
) -> None:
    found: list[dict[str, Any]] = []
    for kind in ("redis", "http"):
        with turnstream.connect(url_of(kind)) as service:
            run = service.create_run(f"{new_name} {kind}", **SETTINGS)
            write_everything(run)
            operate(run)
            assert run.name in service.runs()
            found.append(stored(client, run.name))

    assert found[1] == found[0]
    assert len(found[0]["ledger"]) == 11
    assert sum(map(len, found[0]["payload"].values())) > 25


async def test_async_publisher_works_over_http(
    client: redis.Redis, gateway: GatewayThread, new_run: Callable[..., str]
) -> None:
    run = new_run(client)

    async with AsyncPublisher(gateway.base_url, run) as publisher:
        async with publisher.group("g", 2) as members:
            for trajectory in members:
                await trajectory.append(ids("ab"), ids("CD"))
                await trajectory.seal(1.0)
        await (await publisher.publish(group("h")))
        assert await publisher.lapsed() == []

    assert RunReader(client, run).counts() == {"accepted": 4, "sealed": 4}


# ------------------------------------------------------------------------------ errors


def _deleted_run(service: turnstream.Service, name: str, client: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=1)
    delete_run(client, name)
    _ = run.config


def _group_again(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=8)
    with run.publisher("a") as first, first.group("g", 1) as members:
        for trajectory in members:
            trajectory.append(ids("a"), ids("B"))
            trajectory.seal(1.0)
    with run.publisher("b") as second, second.group("g", 1):
        pass


def _closed_run(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=8)
    run.close()
    with run.publisher("a") as publisher, publisher.group("g", 1):
        pass


def _no_admission(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    run = service.create_run(name, **ONE_GROUP)
    with run.publisher("a", admission_timeout_s=0.5) as publisher, publisher.group("g", 1):
        publisher.publish(group("h")).result()


def _large_group(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=8, max_samples=2)
    with run.publisher("a") as publisher, publisher.group("g", 3):
        pass


def _held_trajectory(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=8)
    with (
        run.publisher("a") as first,
        run.publisher("b") as second,
        first.trajectory("g", 0, num_samples=1) as open_,
    ):
        open_.append(ids("a"), ids("B")).result()
        second.adopt("g", 0)


def _next_run_of_the_name(service: turnstream.Service, name: str, client: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=1)
    delete_run(client, name)
    assert service.create_run(name, batch_groups=2).config.batch_groups == 2
    calls: list[Callable[[], object]] = [
        lambda: run.config,
        run.credit,
        run.pause,
        run.resume,
        run.close,
        run.reopen,
        lambda: run.revise(from_step=2, batch_groups=4),
        lambda: run.post_reward(TrajectoryKey("g", 0), 1.0),
        lambda: run.add_prompts([Prompt(prompt_uid="p", payload=b"", num_samples=1)]),
        run.batches,
    ]
    for call in calls:
        with pytest.raises(RunNotFoundError):
            call()
    assert service.run(name).credit().reason is None  # nothing has changed it
    run.pause()


def _run_of_another_release(service: turnstream.Service, name: str, client: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=1)
    stored = encode_config(run.config).replace('"format": 3', '"format": 9')
    client.hset(keys.run_keys(name).config, "1", stored)
    _ = run.config


def _damaged_run(service: turnstream.Service, name: str, client: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=1)
    client.hset(keys.run_keys(name).config, "1", "{")
    _ = run.config


SCENARIOS: dict[Callable[[turnstream.Service, str, redis.Redis], None], type[TurnstreamError]] = {
    _deleted_run: RunNotFoundError,
    _next_run_of_the_name: RunNotFoundError,
    _run_of_another_release: UnknownFormatError,
    _damaged_run: CorruptRecordError,
    _group_again: ConflictError,
    _closed_run: EndOfRunError,
    _no_admission: NotReadyError,
    _large_group: GroupTooLargeError,
    _held_trajectory: ConflictError,
}

_KEY = TrajectoryKey("g", 0)
_PROMPT = Prompt(prompt_uid="p", payload=b"", num_samples=3)

CALLS: list[tuple[type[TurnstreamError], str, tuple[Any, ...], dict[str, Any]]] = [
    (RunNotFoundError, "service.run", ("no such run",), {}),
    (RunNotFoundError, "service.run", ("..",), {}),
    (InvalidConfigError, "service.run", ("x" * 513,), {}),
    (InvalidConfigError, "service.create_run", ("a~2",), {"batch_groups": 1}),
    (InvalidConfigError, "service.create_run", ("new",), {"batch_groups": 1, "pass_k": 3}),
    (ConflictError, "service.create_run", ("RUN",), {"batch_groups": 2}),
    (InvalidConfigError, "revise", (), {"from_step": 0, "batch_groups": 2}),
    (InvalidConfigError, "close", (), {"leftover": "burn"}),
    (InvalidTurnError, "post_reward", (_KEY, float("nan")), {}),
    (ConflictError, "post_reward", (_KEY, 1.0), {}),
    (ConflictError, "add_prompts", ([dataclasses.replace(_PROMPT, num_samples=1)],), {"first": 7}),
    (InvalidTurnError, "add_prompts", ([],), {"first": 0}),
    (InvalidTurnError, "add_prompts", ([_PROMPT],), {}),
    (NotReadyError, "publisher.next_task", (0.3,), {}),
    (NotReadyError, "wait_for_version", (), {"timeout_s": 0.3}),
]
"""Wrong calls of a service, a run or a publisher, with their errors."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__.strip("_"))
def test_same_mistakes_have_the_same_errors(
    scenario: Any, client: redis.Redis, url_of: Callable[[str], str], new_name: str
) -> None:
    found: list[Any] = []
    for kind in ("redis", "http"):
        with turnstream.connect(url_of(kind)) as service:
            name = f"{new_name} {kind}"
            with pytest.raises(SCENARIOS[scenario]) as raised:
                scenario(service, name, client)
        found.append(_described(raised.value, name))

    assert found[1] == found[0]


def test_wrong_calls_have_the_same_errors(url_of: Callable[[str], str], new_name: str) -> None:
    found: dict[str, list[Any]] = {}
    for kind in ("redis", "http"):
        with turnstream.connect(url_of(kind)) as service:
            name = f"{new_name} {kind}"
            run = service.create_run(name, batch_groups=1, max_samples=2)
            with run.publisher("a") as publisher:
                owners = {"service": service, "publisher": publisher}
                for error, call, given, options in CALLS:
                    owner, _, method = call.rpartition(".")
                    arguments = [name if each == "RUN" else each for each in given]
                    with pytest.raises(error) as raised:
                        getattr(owners.get(owner, run), method)(*arguments, **options)
                    found.setdefault(kind, []).append(_described(raised.value, name))
            run.close(leftover="carry")
            with pytest.raises(ConflictError) as raised:
                run.close(leftover="drop")
            found[kind].append(_described(raised.value, name))

    assert found["http"] == found["redis"]


def _described(error: Any, name: str) -> tuple[Any, ...]:
    """Return class, text and reasons of an error, without the name of the run and numbers."""
    reasons = [
        (each.kind, _without_numbers(each.sentence)) for each in getattr(error, "reasons", ())
    ]
    text = str(error).replace(name, "RUN").replace(keys.encode_name(name), "RUN")
    public = next(each for each in type(error).mro() if each.__module__ == errors.__name__)
    is_repeatable = getattr(error, "retry_after_s", None) is not None
    return public, _without_numbers(text), reasons, is_repeatable


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", text)


# ------------------------------------------------------------------------------ waits


def test_waiting_publisher_sends_one_read_and_no_poll(
    client: redis.Redis,
    gateway: GatewayThread,
    new_run: Callable[..., str],
    recorded: list[wire.Calls],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "ASK_AGAIN_S", 25.0)
    run = new_run(client, **ONE_GROUP)
    reader = RunReader(client, run)
    with (
        turnstream.connect(gateway.base_url) as service,
        service.run(run).publisher() as publisher,
    ):
        publisher.publish(group("g0")).result(10)
        del recorded[:]
        for step in range(1, 4):
            receipt = publisher.publish(group(f"g{step}"))
            with pytest.raises(NotReadyError):
                receipt.result(1.0)
            reader.frees_capacity(stepped=step)
            receipt.result(10)

    sent = Counter(call.WhichOneof("kind") for body in recorded for call in body.calls)
    assert sent["await_wake"] == 3
    assert sent["open_group"] == 6  # each group is refused once, and then admitted


def test_batches_are_pulled_with_a_batcher_of_the_store(
    server: EmbeddedServer, connected: Any, new_name: str
) -> None:
    run = connected.service.create_run(new_name, batch_groups=1)
    with BatcherThread(server.url), run.publisher() as publisher:
        publisher.publish(group("g")).result()
        with run.batches(timeout_s=30) as batches:
            step = next(iter(batches))

            assert step.number == 1


def test_fenced_writer_is_noticed(connected: Any, new_name: str, client: redis.Redis) -> None:
    run = connected.service.create_run(new_name, batch_groups=8, lease_s=0.3)
    with run.publisher("a") as first:
        open_ = first.trajectory("g", 0, num_samples=1)
        open_.append(ids("a"), ids("B")).result()
        client.hset(keys.run_keys(new_name).ledger, "g/0/0", "open:7:b")
        with pytest.raises(FencedError):
            open_.seal(1.0)
