"""Health by the protocol of gRPC, as a balancer or a probe reads it."""

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from turnstream_server.batcher.serving.health import TROUBLE
from turnstream_server.batcher.serving.servicer import SERVICE

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def replica(house):
    return await house.start_batcher()


@pytest.fixture
async def stub(replica):
    async with grpc.aio.insecure_channel(replica.address) as channel:
        yield HealthStub(channel)


async def check(stub, service=""):
    """Return the state, and why it is red."""
    call = stub.Check(HealthCheckRequest(service=service), timeout=60)
    state = (await call).status
    return state, dict(await call.trailing_metadata()).get(TROUBLE, "")


async def next_state(stream):
    return (await asyncio.wait_for(stream.read(), 60)).status


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_a_batcher_whose_store_takes_writes_serves(stub, service):
    assert await check(stub, service) == (SERVING, "")


async def test_missing_store_is_reported_with_its_reason_until_it_is_back(server, stub):
    stream = stub.Watch(HealthCheckRequest(service=SERVICE), timeout=60)
    before = await next_state(stream)

    await asyncio.to_thread(server.kill)
    during = await next_state(stream)
    state, trouble = await check(stub)
    await asyncio.to_thread(server.restart)

    assert before == SERVING
    assert during == state == NOT_SERVING
    assert trouble.startswith("the store cannot be reached")
    assert await next_state(stream) == SERVING
    assert await check(stub) == (SERVING, "")


async def test_watch_turns_red_when_the_replica_stops(replica, stub):
    stream = stub.Watch(HealthCheckRequest(), timeout=60)
    before = await next_state(stream)

    stopped = asyncio.create_task(replica.stop())

    assert (before, await next_state(stream)) == (SERVING, NOT_SERVING)
    await stopped
