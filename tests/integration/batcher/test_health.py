"""Health by the protocol of gRPC: what a balancer or a probe is told."""

import asyncio

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from turnstream_server.batcher.health import HEALTH_SERVICE, TROUBLE, Health
from turnstream_server.batcher.servicer import SERVICE

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


@pytest.fixture
async def replica(house):
    return await house.start_batcher()


@pytest.fixture
async def channel(replica):
    async with grpc.aio.insecure_channel(replica.address) as channel:
        yield channel


def calls(channel, name):
    make = channel.unary_unary if name == "Check" else channel.unary_stream
    return make(
        f"/{HEALTH_SERVICE}/{name}",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=Int32Value.FromString,
    )


async def check(channel, service=""):
    """The state, and why it is red."""
    call = calls(channel, "Check")(StringValue(value=service), timeout=60)
    state = Health((await call).value)
    return state, dict(await call.trailing_metadata()).get(TROUBLE, "")


async def next_state(stream):
    return Health((await asyncio.wait_for(stream.read(), 60)).value)


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_a_batcher_whose_store_takes_writes_serves(channel, service):
    assert await check(channel, service) == (Health.SERVING, "")


async def test_a_service_that_is_not_here_is_not_found(channel):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(channel, "other")

    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_store_that_is_gone_is_told_with_its_reason_until_it_is_back(server, channel):
    stream = calls(channel, "Watch")(StringValue(value=SERVICE), timeout=60)
    before = await next_state(stream)

    await asyncio.to_thread(server.kill)
    during = await next_state(stream)
    state, trouble = await check(channel)
    await asyncio.to_thread(server.restart)

    assert before is Health.SERVING
    assert during is state is Health.NOT_SERVING
    assert trouble.startswith("the store cannot be reached")
    assert await next_state(stream) is Health.SERVING
    assert await check(channel) == (Health.SERVING, "")


async def test_whoever_watches_is_told_that_the_replica_stops(replica, channel):
    known = calls(channel, "Watch")(StringValue(), timeout=60)
    unknown = calls(channel, "Watch")(StringValue(value="other"), timeout=60)
    before = [await next_state(stream) for stream in (known, unknown)]

    await replica.stop()

    assert before == [Health.SERVING, Health.SERVICE_UNKNOWN]
    assert await next_state(known) is Health.NOT_SERVING
    ends = [await stream.read() for stream in (known, unknown)]
    assert not any(isinstance(end, Int32Value) for end in ends)
