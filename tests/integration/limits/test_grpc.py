"""The largest accepted arguments of each gRPC call at once: bounded CPU, memory and store time.

A call without an entry in `LARGEST` fails the first test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import grpc
import pytest
import redis
from google.protobuf.message import Message

import turnstream
from testkit.services.gateway_process import Cost, measured
from testkit.services.processes import batcher_process
from testkit.training.operations import make_operation
from turnstream.store.client.connection import connect_async
from turnstream.types import RecoveryToken
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream.wire.v1.operations_pb2 import GetOperationsRequest
from turnstream_server.batcher.serving import servicer
from turnstream_server.batcher.serving.get import MAX_SHARES
from turnstream_server.batcher.serving.requests import (
    MAX_DP_WORLD_SIZE,
    MAX_EXACT,
    MAX_STEP,
    MAX_WORKER_RANKS,
)
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.operations.contents import CreateModel
from turnstream_server.operations.log import MAX_SHARED, ModelLog, submit
from turnstream_server.operations.models import ModelRecord, create_model
from turnstream_server.operations.operation_records import encode_operation
from turnstream_server.operations.results import Failure

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

CPU_S: Final = 2.0
STORE_S: Final = 0.05
MEMORY_MB: Final = 256
DEFECTS: Final = (
    *(grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL),
    *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED),
)
"""Statuses with which no call may be refused."""

RUN: Final = "largest"
MODEL: Final = "S:train:0"
SESSION: Final = "s" * 512
OBSERVER: Final = "o" * 512
NUM_MINI_BATCHES: Final = MAX_SHARES // MAX_DP_WORLD_SIZE
NUM_GROUPS: Final = 8 * NUM_MINI_BATCHES


class Rig(NamedTuple):
    """A batcher process with one planned step, and the commands of a hosted model."""

    pid: int
    channel: grpc.Channel
    client: redis.Redis


def _session(kind: type[Any], **fields: Any) -> Message:
    return kind(run=RUN, session=SESSION, session_epoch=1, **fields)


def _get(**fields: Any) -> Message:
    last = MAX_DP_WORLD_SIZE - 1
    held = {"first_mini_batch": MAX_STEP, "first_byte": MAX_EXACT, "content_hash": "c" * 128}
    return wire.GetRequest(
        run=RUN, step=1, dp_rank=last, dp_world_size=last + 1, wait_s=30, **held, **fields
    )


def _token(step: int) -> str:
    return str(RecoveryToken(lineage="l" * 1_900, step=step, chain_hash="c" * 64))


LARGEST: Final[dict[str, list[Callable[[], Message]]]] = {
    f"/{servicer.SERVICE}/Start": [
        lambda: wire.StartRequest(run=RUN, session=SESSION, dp_world_size=MAX_DP_WORLD_SIZE),
        lambda: wire.StartRequest(
            run=RUN,
            session="t" * 512,
            dp_world_size=MAX_DP_WORLD_SIZE,
            recovery_token=_token(MAX_STEP),
        ),
    ],
    f"/{servicer.SERVICE}/Get": [
        lambda: _get(session=SESSION, session_epoch=1),
        lambda: _get(observer=OBSERVER),
    ],
    f"/{servicer.SERVICE}/Stepped": [
        lambda: _session(wire.SteppedRequest, step=MAX_STEP, dp_rank=8191, manifest_hash="m" * 128),
    ],
    f"/{servicer.SERVICE}/Committed": [
        lambda: _session(wire.CommittedRequest, dp_rank=8191, recovery_token=_token(MAX_STEP)),
    ],
    f"/{servicer.SERVICE}/AnnounceVersion": [
        lambda: _session(
            wire.AnnounceVersionRequest, version=MAX_EXACT, step=0, weights_uri="u" * 4_096
        ),
    ],
    f"/{servicer.SERVICE}/Observe": [
        lambda: wire.ObserveRequest(run=RUN, observer=OBSERVER, first_step=1, expiry_s=86_400),
    ],
    f"/{servicer.SERVICE}/Observed": [
        lambda: wire.ObservedRequest(run=RUN, observer=OBSERVER, step=1),
    ],
    f"/{servicer.OPERATIONS_SERVICE}/Get": [
        lambda: GetOperationsRequest(
            model_id=MODEL,
            first=1,
            last=MAX_SHARED,
            dp_rank=MAX_WORKER_RANKS - 1,
            dp_world_size=MAX_WORKER_RANKS,
        ),
    ],
}
"""Path of a call to its requests, in an order in which each is accepted as far as it can be."""

ORDER: Final = [
    *(f"/{servicer.SERVICE}/{name}" for name in ("Start", "Observe", "Get")),
    *LARGEST,
]


def _publish(url: str) -> None:
    """Store a step with as many mini-batches as so many ranks may have."""
    settings: dict[str, Any] = {
        "batch_groups": NUM_GROUPS,
        "mini_batch_groups": NUM_GROUPS // NUM_MINI_BATCHES,
    }
    run = turnstream.connect(url).create_run(RUN, **settings)
    with run.publisher(writer="w") as publisher:
        for number in range(NUM_GROUPS):
            with publisher.group(f"g{number}", num_samples=8) as group:
                for trajectory in group:
                    trajectory.append([1, 2], [3, 4], policy_version=0)
                    trajectory.seal(reward=float(number % 7))


async def _submit(url: str) -> None:
    """Create a model whose calls share no pass, because their settings differ."""
    async with connect_async(url) as client:
        record = ModelRecord(MODEL, base_model="tiny", owner="o", lora_rank=0)
        await create_model(client, record, CreateModel(path=None, optimizer=False))
        for number in range(1, MAX_SHARED + 1):
            own = make_operation(8, 500, loss="ppo", clip_low_threshold=number / 100, seed=1)
            await submit(client, MODEL, number, "forward_backward", encode_operation(own))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    file = tmp_path_factory.mktemp("batcher") / "address"
    with EmbeddedServer() as server, batcher_process(server.url, file) as (pid, address):
        _publish(server.url)
        asyncio.run(_submit(server.url))
        client = redis.Redis.from_url(server.url)
        log = ModelLog.acquire(client, MODEL, worker="w", lease_s=600)
        log.finish({0: Failure("made", "server")})
        log.take()
        client.config_set("slowlog-log-slower-than", int(STORE_S * 1e6))
        with grpc.insecure_channel(address) as channel:
            yield Rig(pid, channel, client)


def _cost(rig: Rig, path: str, request: Message) -> tuple[Cost, float]:
    """Return the cost of a call, which may be refused, and the seconds of its slowest command."""
    rig.client.slowlog_reset()
    is_stream = path.endswith("/Get")
    method = (rig.channel.unary_stream if is_stream else rig.channel.unary_unary)(path)
    with measured(rig.pid) as costs:
        try:
            answer = method(request.SerializeToString(), timeout=120)
            list(answer) if is_stream else None
        except grpc.RpcError as error:
            code = error.code()  # pyright: ignore[reportAttributeAccessIssue]
            if code in DEFECTS:
                raise
    slowest: Any = rig.client.slowlog_get(1)
    return costs[0], slowest[0]["duration"] / 1e6 if slowest else 0.0


def test_each_grpc_call_has_an_entry_with_its_largest_request() -> None:
    unused: Any = SimpleNamespace(send=None)
    calls = servicer.BatchesServicer(unused, unused)
    handlers: Any = servicer.handlers(calls, unused, unused, unused, unused)

    known = {path for each in handlers for path in each._method_handlers}
    assert known == set(LARGEST), "add the largest request of the call to LARGEST"


def test_largest_requests_stay_within_their_bounds(rig: Rig) -> None:
    """Takes more than 5 s: each of the largest requests is made, measured and answered."""
    for path in ORDER:
        for place, make in enumerate(LARGEST[path]):
            cost, store_s = _cost(rig, path, make())
            if store_s > STORE_S:  # a busy machine may have stopped the store
                _, store_s = _cost(rig, path, make())
            assert cost.cpu_s <= CPU_S, (path, place)
            assert cost.memory_mb <= MEMORY_MB, (path, place)
            assert store_s <= STORE_S, (path, place)
