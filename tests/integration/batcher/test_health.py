"""Health of a store that is away, and the reports of a full one."""

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
import redis
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from turnstream.errors import NotReadyError, StoreFullError, WaitKind
from turnstream.generator import Publisher
from turnstream.store.run.tasks import Prompt, add_prompts
from turnstream_server.batcher.serving.health import TROUBLE
from turnstream_server.batcher.serving.servicer import SERVICE

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def replica(cluster):
    return await cluster.start_batcher()


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


NUM_OPEN = 8


class FullStore:
    """A run whose open trajectories have filled the store, and their publisher."""

    def __init__(self, cluster: Any, client: redis.Redis) -> None:
        self.client = client
        self.run = cluster.create_run(batch_groups=NUM_OPEN)
        add_prompts(client, self.run, [Prompt(prompt_uid="p", payload=b"", num_samples=2)])
        self.publisher = Publisher(
            cluster.url, self.run, writer="gen-7", timeout_s=2.5, admission_timeout_s=1.5
        )
        self.writers = [
            self.publisher.trajectory(f"g{n}", 0, num_samples=1) for n in range(NUM_OPEN)
        ]
        for writer in self.writers:
            writer.__enter__()
            writer.append([1], [2] * 3000, policy_version=0)
        self.publisher.flush(20)

    def fill(self) -> None:
        """Let the store have less memory than it uses."""
        memory: Any = self.client.info("memory")
        self.client.config_set("maxmemory", memory["used_memory"] - 200_000)

    def close(self) -> None:
        """Let it have memory again, and leave."""
        self.client.config_set("maxmemory", 0)
        for writer in self.writers:
            if not writer.has_ended:
                writer.abandon("over")
        self.publisher.close()


@pytest.fixture
def full(cluster: Any) -> Iterator[FullStore]:
    store = FullStore(cluster, cluster.client)
    yield store
    store.close()


def says_full(text: str) -> bool:
    """Whether a sentence names the bytes used and allowed, and what holds them, by type."""
    names = ("full", "it uses ", "maxmemory is ", "by open trajectories", "by sealed ones")
    return all(name in text for name in names) and "away" not in text


def test_every_wait_of_a_generator_on_a_full_store_says_full(full: FullStore, cluster: Any) -> None:
    full.fill()
    full.writers[0].append([1] + [2] * 3000 + [3], [4] * 3000, policy_version=0)

    with pytest.raises(NotReadyError) as flushed:
        full.publisher.flush(timeout_s=1.5)
    with pytest.raises(StoreFullError) as sealed:
        full.writers[0].seal(reward=1.0)
    with pytest.raises(NotReadyError) as grouped, full.publisher.group("new", 2):
        pass
    with pytest.raises(NotReadyError) as tasked:
        full.publisher.next_task(wait_s=0.5)
    with (
        Publisher(cluster.url, full.run, writer="other") as other,
        pytest.raises(StoreFullError, match="refuses writes") as adopted,
    ):
        other.adopt("g1", 0)

    for error, kind in (
        (flushed.value, "not_acknowledged"),
        (sealed.value, "not_acknowledged"),
        (grouped.value, WaitKind.NO_ADMISSION),
        (tasked.value, WaitKind.NOT_READY),
    ):
        reasons = error.reasons
        assert [reason.kind for reason in reasons[:2]] == [kind, "store_full"]
        assert says_full(reasons[1].sentence)
    assert says_full(str(sealed.value))
    assert [reason.kind for reason in adopted.value.reasons] == ["store_full"]


async def test_batcher_of_full_store_says_full(full, replica, stub, cluster):
    trainer = cluster.trainer(replica, full.run)
    await trainer.start()
    full.fill()

    error = await trainer.refused(1, words="^step 1: .*; the store is full")
    state, _ = await check(stub)

    assert error.reasons[0].kind == "store_full"
    assert says_full(error.reasons[0].sentence)
    assert state == SERVING
