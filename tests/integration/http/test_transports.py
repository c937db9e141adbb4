"""The same calls over Redis and over HTTP: equal data, equal errors."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import redis

import turnstream
from testkit import group, ids
from testkit.requests.generator_calls import SETTINGS, operate, write_everything
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from turnstream import errors
from turnstream.errors import (
    ConflictError,
    CorruptRecordError,
    EndOfRunError,
    GroupTooLargeError,
    InvalidConfigError,
    InvalidTurnError,
    NotReadyError,
    RunNotFoundError,
    TurnstreamError,
    UnknownFormatError,
)
from turnstream.generator import Prompt
from turnstream.generator.transport import sender
from turnstream.records.configs import encode_config
from turnstream.store.client import keys
from turnstream.types import TrajectoryKey
from turnstream.wire.v1 import calls_pb2 as wire
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


# ------------------------------------------------------------------------------ errors


class Mistakes:
    """Wrong calls of a service, and what their errors say."""

    def __init__(self, service: turnstream.Service, name: str, client: redis.Redis) -> None:
        self.found: list[Any] = []
        self._service = service
        self._name = name
        self._client = client

    @contextlib.contextmanager
    def wrong(self, kind: type[TurnstreamError]) -> Iterator[None]:
        """Expect an error of this kind in the block."""
        with pytest.raises(kind) as raised:
            yield
        self.found.append(_described(raised.value, self._name))

    def call_a_service(self) -> None:
        """Make calls of a service that have wrong arguments."""
        service = self._service
        service.create_run(self._name, batch_groups=1)
        for name in ("no such run", ".."):
            with self.wrong(RunNotFoundError):
                service.run(name)
        with self.wrong(InvalidConfigError):
            service.run("x" * 513)
        with self.wrong(InvalidConfigError):
            service.create_run("a~2", batch_groups=1)
        with self.wrong(InvalidConfigError):
            service.create_run("new", batch_groups=1, pass_k=3)
        with self.wrong(ConflictError):
            service.create_run(self._name, batch_groups=2)

    def call_a_run(self) -> None:
        """Make calls of a run that have wrong arguments, or come at a wrong time."""
        run = self._service.create_run(f"{self._name} called", batch_groups=1, max_samples=2)
        prompts = [Prompt(prompt_uid="p", payload=b"", num_samples=each) for each in (1, 3)]
        with self.wrong(InvalidConfigError):
            run.revise(from_step=0, batch_groups=2)
        with self.wrong(InvalidConfigError):
            run.close(leftover=cast("Any", "burn"))
        for reward, kind in ((float("nan"), InvalidTurnError), (1.0, ConflictError)):
            with self.wrong(kind):
                run.post_reward(TrajectoryKey("g", 0), reward)
        with self.wrong(ConflictError):
            run.add_prompts(prompts[:1], first=7)
        with self.wrong(InvalidTurnError):
            run.add_prompts([], first=0)
        with self.wrong(InvalidTurnError):
            run.add_prompts(prompts[1:])
        with self.wrong(NotReadyError):
            run.wait_for_version(timeout_s=0.3)
        with run.publisher("a") as publisher, self.wrong(NotReadyError):
            publisher.next_task(0.3)
        run.close(leftover="carry")
        with self.wrong(ConflictError):
            run.close(leftover="drop")

    def open_groups(self) -> None:
        """Open groups and trajectories that a writer may not have."""
        run = self._service.create_run(f"{self._name} groups", batch_groups=8, max_samples=2)
        with run.publisher("a") as first, run.publisher("b") as second:
            first.publish(group("g")).result()
            with self.wrong(ConflictError), second.group("g", 2):
                pass
            with self.wrong(GroupTooLargeError), first.group("h", 3):
                pass
            with first.trajectory("t", 0, num_samples=1) as open_:
                open_.append(ids("a"), ids("B")).result()
                with self.wrong(ConflictError):
                    second.adopt("t", 0)
                open_.seal(1.0)
            run.close()
            with self.wrong(EndOfRunError), first.group("late", 1):
                pass
        narrow = self._service.create_run(f"{self._name} narrow", **ONE_GROUP)
        with narrow.publisher("a", admission_timeout_s=2.0) as publisher:
            publisher.publish(group("g")).result()
            with self.wrong(NotReadyError):
                publisher.publish(group("h")).result()

    def use_a_deleted_run(self) -> None:
        """Use a run that was deleted, while the next run of its name exists."""
        name = f"{self._name} deleted"
        run = self._service.create_run(name, batch_groups=1)
        delete_run(self._client, name)
        with self.wrong(RunNotFoundError):
            _ = run.config
        assert self._service.create_run(name, batch_groups=2).config.batch_groups == 2
        calls: list[Callable[[], object]] = [
            *(run.credit, run.pause, run.resume, run.close, run.reopen, run.batches),
            lambda: run.config,
            lambda: run.revise(from_step=2, batch_groups=4),
            lambda: run.post_reward(TrajectoryKey("g", 0), 1.0),
            lambda: run.add_prompts([Prompt(prompt_uid="p", payload=b"", num_samples=1)]),
        ]
        for call in calls:
            with self.wrong(RunNotFoundError):
                call()
        assert self._service.run(name).credit().reason is None  # nothing has changed it

    def read_other_records(self) -> None:
        """Read a run of another release, and a damaged one."""
        name = f"{self._name} stored"
        run = self._service.create_run(name, batch_groups=1)
        later = encode_config(run.config).replace('"format": 3', '"format": 9')
        for stored, kind in ((later, UnknownFormatError), ("{", CorruptRecordError)):
            self._client.hset(keys.run_keys(name).config, "1", stored)
            with self.wrong(kind):
                _ = run.config


def test_same_mistakes_have_the_same_errors(
    client: redis.Redis, url_of: Callable[[str], str], new_name: str
) -> None:
    found: list[list[Any]] = []
    for kind in ("redis", "http"):
        with turnstream.connect(url_of(kind)) as service:
            mistakes = Mistakes(service, f"{new_name} {kind}", client)
            mistakes.call_a_service()
            mistakes.call_a_run()
            mistakes.open_groups()
            mistakes.use_a_deleted_run()
            mistakes.read_other_records()
        found.append(mistakes.found)

    for over_redis, over_http in zip(*found, strict=True):
        assert over_http == over_redis


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
    with turnstream.connect(gateway.base_url) as service, service.run(run).publisher() as publisher:
        publisher.publish(group("g0")).result(10)
        del recorded[:]
        receipt = publisher.publish(group("g1"))
        with pytest.raises(NotReadyError):
            receipt.result(1.0)
        reader.frees_capacity(stepped=1)
        receipt.result(10)

    sent = Counter(call.WhichOneof("kind") for body in recorded for call in body.calls)
    assert sent["await_wake"] == 1
    assert sent["open_group"] == 2  # the group is refused once, and then admitted
