"""Keys of gRPC calls: every method of every service."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import grpc
import pytest
import redis
from google.protobuf.message_factory import GetMessageClass

import testkit
from testkit import wait_until
from testkit.services.batchers import BatcherThread
from turnstream.errors import (
    AccessDeniedError,
    RejectedError,
    ReleasedError,
    RunNotFoundError,
    TurnstreamError,
    UnknownKeyError,
)
from turnstream.generator import Publisher
from turnstream.records.statuses import status_to_error
from turnstream.store.client.connection import connect_async
from turnstream.wire.v1 import batches_pb2, operations_pb2
from turnstream.worker import BatchStream
from turnstream.worker.observer import ObserverStream
from turnstream.worker.operation_pulls import OperationPuller
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.keys.records import KeyLimits, owner_of
from turnstream_server.keys.store import create_key, revoke_key
from turnstream_server.operations.contents import CreateModel
from turnstream_server.operations.models import ModelRecord, create_model

pytestmark = [pytest.mark.grpc, pytest.mark.redis]

METHODS = [
    method
    for file in (batches_pb2.DESCRIPTOR, operations_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)

FIELDS = {
    **dict.fromkeys(("dp_world_size", "session_epoch", "step", "version", "first", "last"), 1),
    "session": "s",
    "recovery_token": "v1:main:1:cccccccc",
    "model_id": "S:train:0",
    "expiry_s": 60.0,
    "wait_s": 0.01,
}
READS = {"Observe", "Observed"}
DENIED = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def target(server: EmbeddedServer) -> Iterator[str]:
    """A batcher whose calls need a key."""
    with BatcherThread(server.url, requires_key=True) as batcher:
        yield batcher.target


@pytest.fixture
def run(client: redis.Redis, new_run: Callable[..., str]) -> str:
    return new_run(client, batch_groups=1, max_staleness=100)


@pytest.fixture
def new_key(client: redis.Redis) -> Callable[..., tuple[str, str]]:
    """`new_key("train", runs=[...])` creates a key with roles; returns its name and the key."""

    def make(*roles: Any, **options: Any) -> tuple[str, str]:
        name = f"key {next(_numbers)}"
        return name, create_key(client, name, roles=roles, **options)

    return make


class Answer(NamedTuple):
    """End of a call.

    Attributes:
        code: status of gRPC.
        error: the error of the status; None after success.
        trailing: trailing metadata.
    """

    code: str
    error: TurnstreamError | None
    trailing: dict[str, str | bytes]


def call(target: str, method: Any, run: str, *metadata: tuple[str, str], **fields: Any) -> Answer:
    """Call a method with a valid request."""
    names = method.input_type.fields_by_name
    given = {**FIELDS, "run": run, **({"observer": "o"} if method.name in READS else {}), **fields}
    request = GetMessageClass(method.input_type)(
        **{name: value for name, value in given.items() if name in names}
    )
    path = f"/{method.containing_service.full_name}/{method.name}"
    with grpc.insecure_channel(target) as channel:
        if method.server_streaming:
            answers = channel.unary_stream(path)(
                request.SerializeToString(), timeout=30, metadata=metadata
            )
        else:
            answers = channel.unary_unary(path).future(
                request.SerializeToString(), timeout=30, metadata=metadata
            )
        code, details = answers.code(), answers.details() or ""
        trailing = dict(answers.trailing_metadata() or ())
    is_ok = code is grpc.StatusCode.OK
    return Answer(code.name, None if is_ok else status_to_error(code.name, details), trailing)


def status(target: str, method: Any, run: str, *metadata: tuple[str, str], **fields: Any) -> str:
    """Call a method with a valid request, and return its status and its message."""
    code, error, _ = call(target, method, run, *metadata, **fields)
    return code if error is None else f"{code} {error}"


async def new_model(url: str, *, owner: str) -> str:
    """Create a model that belongs to the key of this name, and return its id."""
    model_id = f"S{owner.split()[1]}:train:0"
    async with connect_async(url) as client:
        record = ModelRecord(model_id, base_model="tiny", owner=owner_of(owner), lora_rank=0)
        await create_model(client, record, CreateModel(path=None, optimizer=False))
    return model_id


@every_method
def test_method_refuses_keys_that_may_not_call_it(
    target: str, client: redis.Redis, run: str, new_key: Any, method: Any
) -> None:
    _, expired = new_key("admin", expires_s=0.001)
    name, revoked = new_key("admin")
    revoke_key(client, name)
    headers = [
        (),
        *((("x-api-key", each),) for each in ("tml-unknown", expired, revoked)),
        (("authorization", "Bearer tml-unknown"),),
        (("authorization", f"Basic {expired}"),),
    ]
    found = [status(target, method, run, *metadata) for metadata in headers]
    assert {each.split()[0] for each in found} == {"UNAUTHENTICATED"}
    assert not any("tml-" in each for each in found)

    needed, other = ("read", "train") if method.name in READS else ("train", "read")
    codes = {
        role: status(target, method, run, ("x-api-key", new_key(role)[1])).split()[0]
        for role in ("produce", other, needed, "admin")
    }
    assert codes["produce"] == codes[other] == "PERMISSION_DENIED"
    assert not {codes[needed], codes["admin"]} & DENIED

    key = ("x-api-key", new_key("train", "read", runs=[run])[1])
    if method.input_type.name == "GetOperationsRequest":
        assert status(target, method, "", key).startswith("NOT_FOUND")  # a model of another owner
        return
    found = [status(target, method, each, key) for each in (f"{run}-other", f"{run}~2", run)]
    assert found[0].startswith("PERMISSION_DENIED ")
    assert found[0].endswith(f"may use the runs {run}, and not '{run}-other'")
    assert not {each.split()[0] for each in found[1:]} & DENIED


def test_get_of_an_observer_needs_the_role_read(target: str, run: str, new_key: Any) -> None:
    (method,) = [each for each in METHODS if each.full_name.endswith("Batches.Get")]
    name, key = new_key("read")
    bearer = ("authorization", f"bearer {key}")

    own, other = (
        status(target, method, run, ("x-api-key", ""), bearer, observer=observer)
        for observer in ("o", "")
    )

    assert own.split()[0] not in DENIED
    assert other == f"PERMISSION_DENIED key '{name}' has the roles read, needed is train"


async def test_key_reads_operations_of_its_own_models_alone(
    target: str, server: EmbeddedServer, new_key: Any
) -> None:
    name, own = new_key("train")
    model_id = await new_model(server.url, owner=name)
    (method,) = [each for each in METHODS if each.containing_service.name == "Operations"]

    found = [
        status(target, method, "", ("x-api-key", key), model_id=model_id)
        for key in (own, new_key("train")[1], new_key("admin")[1])
    ]

    assert [each.split()[0] for each in found] == ["OUT_OF_RANGE", "NOT_FOUND", "OUT_OF_RANGE"]


@every_method
def test_method_refuses_calls_above_the_rate_of_their_key(
    target: str, run: str, new_key: Any, method: Any
) -> None:
    name, limited = new_key("admin", limits=KeyLimits(requests_per_s=0.1))
    other = new_key("admin", limits=KeyLimits(requests_per_s=1e6))[1]

    first, second, later = (
        call(target, method, run, ("x-api-key", key)) for key in (limited, limited, other)
    )

    assert "RESOURCE_EXHAUSTED" not in (first.code, later.code)
    assert second.code == "RESOURCE_EXHAUSTED"
    assert str(second.error).startswith(f"key {name!r} may use 0.1 requests per second: wait ")
    assert isinstance(second.error, RejectedError)
    assert 0 < (second.error.retry_after_s or 0) <= 10
    assert 1 <= int(second.trailing["retry-after"]) <= 10


def test_calls_above_the_bytes_of_their_key_are_refused(
    target: str, run: str, new_key: Any
) -> None:
    (method,) = [each for each in METHODS if each.full_name.endswith("Batches.Start")]
    rate, size = (
        ("x-api-key", new_key("train", limits=limits)[1])
        for limits in (KeyLimits(bytes_per_s=10.0), KeyLimits(max_body_bytes=300))
    )

    by_rate = [call(target, method, run, rate, session=each * 250) for each in "ab"]
    by_size = [call(target, method, run, size, session="c" * each) for each in (100, 400)]

    for first, second in (by_rate, by_size):
        assert first.code != "RESOURCE_EXHAUSTED"
        assert second.code == "RESOURCE_EXHAUSTED"
    assert "retry-after" in by_rate[1].trailing
    assert "retry-after" not in by_size[1].trailing
    assert "may send 300 bytes in a request" in str(by_size[1].error)


async def test_streams_wait_for_the_rate_of_their_key(
    server: EmbeddedServer, target: str, run: str, new_key: Any
) -> None:
    name, key = new_key("train", limits=KeyLimits(requests_per_s=0.5))
    model_id = await new_model(server.url, owner=name)

    def work() -> int:
        with Publisher(server.url, run) as publisher:
            publisher.publish(testkit.group("g")).result(10)
        with BatchStream(target, run, api_key=key, timeout_s=60) as stream:
            next(stream)
            stream.stepped()
            num_retries = stream.statistics().num_retries
        puller = OperationPuller(target, dp_rank=0, dp_world_size=1, api_key=key)
        with pytest.raises(ReleasedError):  # no command has a content
            puller.pull(model_id, first=1, last=1)
        puller.close()
        return num_retries

    assert await asyncio.to_thread(work) > 0
    with pytest.raises(RejectedError, match=r"may use 0\.5 requests per second"):
        await asyncio.to_thread(BatchStream, target, run, api_key=key, timeout_s=0.5)


def test_health_needs_no_key(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        answer = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30)

    assert answer == b"\x08\x01"  # SERVING


def test_streams_train_and_observe_with_their_keys(
    server: EmbeddedServer, target: str, run: str, new_key: Any
) -> None:
    trains, reads = new_key("train", runs=[run])[1], new_key("read", runs=[run])[1]
    with Publisher(server.url, run) as publisher:
        publisher.publish(testkit.group("g")).result(10)

    with (
        BatchStream(target, run, api_key=trains, timeout_s=30) as stream,
        ObserverStream(target, run, "audit", first_step=1, api_key=reads, timeout_s=30) as observer,
    ):
        hashes = [next(each).content_hash for each in (stream, observer)]
        stream.stepped()
        other = ("x-api-key", new_key("read", runs=[run])[1])
        for method in METHODS:
            if "observer" in method.input_type.fields_by_name:
                refused = status(target, method, run, other, observer="audit")
                assert "belongs to another API key" in refused

    assert hashes[0] == hashes[1]


def test_streams_raise_the_refusal_at_once(
    client: redis.Redis, target: str, run: str, new_key: Any
) -> None:
    began_s = time.monotonic()
    for key in (None, "", "tml-unknown"):
        puller = OperationPuller(target, dp_rank=0, dp_world_size=1, api_key=key)
        with pytest.raises(UnknownKeyError, match=r"has no key|unknown or revoked"):
            puller.pull("S:train:0", first=1, last=1)
        for begin in (BatchStream, partial(ObserverStream, observer="audit")):
            with pytest.raises(UnknownKeyError, match=r"has no key|unknown or revoked"):
                begin(target, run, api_key=key, timeout_s=300)
    with pytest.raises(AccessDeniedError, match="needed is train") as caught:
        BatchStream(target, run, api_key=new_key("produce")[1])
    assert type(caught.value) is AccessDeniedError
    assert time.monotonic() - began_s < 60

    name, key = new_key("train")

    with BatchStream(target, run, api_key=key, timeout_s=4.0) as stream:
        revoke_key(client, name)
        with pytest.raises(UnknownKeyError):
            wait_until(lambda: stream.poll(timeout_s=0.1), describe="the refusal")


def test_local_batcher_needs_no_key_but_keeps_to_a_stored_one(
    server: EmbeddedServer, run: str, new_key: Any
) -> None:
    with BatcherThread(server.url) as batcher:
        for key in ("", "tml-any", new_key("train")[1]):
            BatchStream(batcher.target, run, api_key=key).close()
        with pytest.raises(AccessDeniedError):
            BatchStream(batcher.target, run, api_key=new_key("read")[1])
        with pytest.raises(RunNotFoundError):
            BatchStream(batcher.target, "no such run")
