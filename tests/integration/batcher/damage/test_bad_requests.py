"""Requests that no SDK sends, over real gRPC: refused with a typed error, and nothing changes."""

import asyncio
import logging
import math
from typing import Any

import grpc.aio
import numpy as np
import pytest

from testkit import group, wait_until_async
from turnstream.errors import InvalidConfigError
from turnstream.records.statuses import status_to_error
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.types import Group, Trajectory, Turn
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.serving.requests import MAX_DP_WORLD_SIZE

SERVICE = wire.DESCRIPTOR.services_by_name["Batches"]
KINDS: dict[str, Any] = {
    method.name: getattr(wire, method.input_type.name) for method in SERVICE.methods
}
FORTY = 10**40
NOT_SECONDS = (math.nan, math.inf, -math.inf, -1.0, 1e300)
BAD: dict[str, tuple[Any, ...]] = {
    "run": ("", "r" * 513, "ä" * 100),
    "observer": ("o" * 513, "ä" * 100),
    "session": ("s" * 513,),
    "recovery_token": (
        *("x", "a:b", "main:1:ab", "v1:main:-1:", "v1:main:x:y", f"v1:main:{FORTY}:ab", "m" * 3000),
    ),
    "dp_world_size": (0, MAX_DP_WORLD_SIZE + 1, 10**6, 2**32 - 1),
    "dp_rank": (MAX_DP_WORLD_SIZE, 2**32 - 1),
    "step": (2**31, 2**63, 2**64 - 1),
    "first_step": (2**31, 2**63, 2**64 - 1),
    "session_epoch": (2**53, 2**64 - 1),
    "version": (-1, -(2**63), 2**63 - 1),
    "wait_s": NOT_SECONDS,
    "expiry_s": (*NOT_SECONDS, 0.0),
    "previous_hash": ("h" * 129,),
    "manifest_hash": ("h" * 129,),
    "weights_uri": ("w" * 4097,),
    "first_mini_batch": (),  # a caller that has other mini-batches gets all of them
    "first_byte": (2**53, 2**64 - 1),
    "content_hash": ("h" * 129,),
    "reads_xxh3": (),
}
ALSO_BAD: dict[tuple[str, str], tuple[Any, ...]] = {
    ("Start", "session"): ("",),
    ("Committed", "recovery_token"): ("",),
    ("Observe", "observer"): ("",),
    ("Observed", "observer"): ("",),
    ("Get", "step"): (0,),
    ("Get", "dp_rank"): (1,),
    ("Stepped", "step"): (0,),
}
CASES = [
    (method, field.name, value)
    for method, kind in KINDS.items()
    for field in kind.DESCRIPTOR.fields
    for value in (*BAD[field.name], *ALSO_BAD.get((method, field.name), ()))
]


def good_request(method: str, run: str) -> Any:
    """Return a request that a service would answer, or at least look up."""
    values = {
        "run": run,
        "recovery_token": "v1:main:0:",
        "dp_world_size": 1,
        "session": "another" if method == "Start" else "s",
        "session_epoch": 1,
        "step": 1,
        "wait_s": 0.1,
        "observer": "" if method == "Get" else "audit",
        "expiry_s": 60.0,
        "version": 7,
    }
    kind = KINDS[method]
    known = {field.name for field in kind.DESCRIPTOR.fields}
    return kind(**{name: value for name, value in values.items() if name in known})


async def call(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.aio.AioRpcError:
    path = f"/turnstream.wire.v1.Batches/{method}"
    make = channel.unary_stream if method == "Get" else channel.unary_unary
    made: Any = make(path)(data, timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (made.read() if method == "Get" else made)
    return caught.value


def kept(url: str, run: str) -> dict[str, Any]:
    """Return everything of a run that a caller of the batcher can change."""
    names = keys.run_keys(run)
    hashes = (names.frontier, names.sessions, names.ranks, names.observers, names.batches)
    with connect(url) as client:
        stored: dict[str, Any] = {name: client.hgetall(name) for name in hashes}
        stored[names.versions] = client.xlen(names.versions)
        stored[names.events] = client.xlen(names.events)
        return stored


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    """Check that one call left at most one line, and no traceback."""
    records = [record for record in caplog.records if record.name != "asyncio"]
    assert len(records) <= 1
    assert not [record for record in caplog.records if record.exc_info]
    caplog.clear()


async def test_bad_fields_are_refused_and_change_nothing(cluster, caplog):
    run = cluster.create_run(batch_groups=1)
    replica = await cluster.start_batcher()
    await cluster.publish(run, group("g0"))
    trainer = cluster.trainer(replica, run)
    await trainer.start("s")
    await trainer.get(1)
    before = kept(cluster.url, run)
    caplog.set_level(logging.INFO)
    caplog.clear()

    async with grpc.aio.insecure_channel(replica.address) as channel:
        for method, field, value in CASES:
            request = good_request(method, run)
            setattr(request, field, value)
            status = await call(channel, method, request.SerializeToString())

            error = status_to_error(status.code().name, status.details() or "")
            assert (status.code().name, type(error)) == ("INVALID_ARGUMENT", InvalidConfigError), (
                f"{method}.{field} = {value!r}: {status.details()}"
            )
            assert isinstance(error, InvalidConfigError)
            assert error.field == field
            check_log(caplog)

    assert kept(cluster.url, run) == before
    assert len(await trainer.get(1)) == 1


async def test_garbage_bytes_are_refused_with_one_log_line(cluster, caplog):
    replica = await cluster.start_batcher()
    caplog.set_level(logging.INFO)
    caplog.clear()

    async with grpc.aio.insecure_channel(replica.address) as channel:
        for data in (b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\xff"):
            for method in KINDS:
                status = await call(channel, method, data)

                error = status_to_error(status.code().name, status.details() or "")
                assert isinstance(error, InvalidConfigError), method
                assert error.field == "request", method
                check_log(caplog)


async def test_cancelled_transfer_is_logged_once(cluster, caplog):
    run = cluster.create_run(batch_groups=1)
    replica = await cluster.start_batcher()
    await cluster.publish(run, large_group())
    trainer = cluster.trainer(replica, run)
    await trainer.start("s")
    await trainer.get(1)
    caplog.set_level(logging.INFO)
    caplog.clear()

    data = good_request("Get", run).SerializeToString()
    async with grpc.aio.insecure_channel(replica.address) as channel:
        get = channel.unary_stream("/turnstream.wire.v1.Batches/Get")(data)
        await anext(aiter(get))
        await asyncio.sleep(0.2)  # the window of the transport is full by then
        get.cancel()
        ended = "ended its Get of step 1"  # asyncio may log a line of its own
        await wait_until_async(lambda: ended in caplog.text, describe="a line of the log")

    check_log(caplog)
    assert len(await trainer.get(1)) == 1


def large_group(num_tokens: int = 1_000_000) -> Group:
    """Return a group whose batch is far larger than the window of a connection."""

    def member(sample: int) -> Trajectory:
        turn = Turn(
            prompt_ids=np.arange(2, dtype=np.int32),
            response_ids=np.zeros(num_tokens, np.int32),
            logprobs=np.zeros(num_tokens, np.float32),
        )
        return Trajectory(sample=sample, turns=(turn,), reward=float(sample))

    return Group(group_id="large", trajectories=(member(0), member(1)), prompt_uid="")
