"""The same calls over Redis and over HTTP: equal data, equal errors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

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


def _unknown_run(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    service.run(name)


def _deleted_run(service: turnstream.Service, name: str, client: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=1)
    delete_run(client, name)
    _ = run.config


def _other_settings(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    service.create_run(name, batch_groups=1)
    service.create_run(name, batch_groups=2)


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


def _no_prompt_left(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=8)
    with run.publisher("a") as publisher:
        publisher.next_task(0.3)


def _large_prompt(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=8, max_samples=2)
    run.add_prompts([Prompt(prompt_uid="p", payload=b"", num_samples=3)])


def _held_trajectory(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=8)
    with (
        run.publisher("a") as first,
        run.publisher("b") as second,
        first.trajectory("g", 0, num_samples=1) as open_,
    ):
        open_.append(ids("a"), ids("B")).result()
        second.adopt("g", 0)


def _unknown_reward(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=8)
    run.post_reward(TrajectoryKey("g", 0), 1.0)


def _planned_step(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=8)
    run.close(leftover="carry")
    run.close(leftover="drop")


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


def _id_in_place_of_a_name(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    service.create_run(f"{name}~2", batch_groups=1)


def _name_without_a_key(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    service.run("x" * 513)


def _dots(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    service.run("..")


def _unread_setting(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    service.create_run(name, batch_groups=1, pass_k=3)


def _step_zero(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    service.create_run(name, batch_groups=1).revise(from_step=0, batch_groups=2)


def _unknown_leftover(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    service.create_run(name, batch_groups=1).close(leftover=cast("Any", "burn"))


def _reward_of_no_number(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    service.create_run(name, batch_groups=1).post_reward(TrajectoryKey("g", 0), float("nan"))


def _missing_prompts(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=1)
    run.add_prompts([Prompt(prompt_uid="p", payload=b"", num_samples=1)], first=7)


def _prompts_from_zero(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    service.create_run(name, batch_groups=1).add_prompts([], first=0)


def _run_of_another_release(service: turnstream.Service, name: str, client: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=1)
    stored = encode_config(run.config).replace('"format": 3', '"format": 9')
    client.hset(keys.run_keys(name).config, "1", stored)
    _ = run.config


def _damaged_run(service: turnstream.Service, name: str, client: redis.Redis) -> None:
    run = service.create_run(name, batch_groups=1)
    client.hset(keys.run_keys(name).config, "1", "{")
    _ = run.config


def _no_version(service: turnstream.Service, name: str, _: redis.Redis) -> None:
    service.create_run(name, batch_groups=8).wait_for_version(timeout_s=0.3)


Case = Callable[[turnstream.Service, str, redis.Redis], None]

CASES: dict[Case, type[TurnstreamError]] = {
    _unknown_run: RunNotFoundError,
    _deleted_run: RunNotFoundError,
    _next_run_of_the_name: RunNotFoundError,
    _dots: RunNotFoundError,
    _id_in_place_of_a_name: InvalidConfigError,
    _name_without_a_key: InvalidConfigError,
    _unread_setting: InvalidConfigError,
    _step_zero: InvalidConfigError,
    _unknown_leftover: InvalidConfigError,
    _reward_of_no_number: InvalidTurnError,
    _missing_prompts: ConflictError,
    _prompts_from_zero: InvalidTurnError,
    _run_of_another_release: UnknownFormatError,
    _damaged_run: CorruptRecordError,
    _other_settings: ConflictError,
    _group_again: ConflictError,
    _closed_run: EndOfRunError,
    _no_admission: NotReadyError,
    _large_group: GroupTooLargeError,
    _no_prompt_left: NotReadyError,
    _large_prompt: InvalidTurnError,
    _held_trajectory: ConflictError,
    _unknown_reward: ConflictError,
    _planned_step: ConflictError,
    _no_version: NotReadyError,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_same_mistakes_have_the_same_errors(
    case: Case,
    client: redis.Redis,
    url_of: Callable[[str], str],
    new_name: str,
) -> None:
    found: list[Any] = []
    for kind in ("redis", "http"):
        with turnstream.connect(url_of(kind)) as service:
            name = f"{new_name} {kind}"
            with pytest.raises(CASES[case]) as raised:
                case(service, name, client)
        error = raised.value
        reasons = [
            (each.kind, _without_numbers(each.sentence)) for each in getattr(error, "reasons", ())
        ]
        retry_s = getattr(error, "retry_after_s", None)
        text = str(error).replace(name, "RUN").replace(keys.encode_name(name), "RUN")
        public = next(each for each in type(error).mro() if each.__module__ == errors.__name__)
        found.append((public, _without_numbers(text), reasons, retry_s is not None))

    assert found[1] == found[0]


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
