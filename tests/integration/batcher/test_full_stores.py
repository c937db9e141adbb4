"""A store that is full of open trajectories reports this in every answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
import redis
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from rich.console import Console

from testkit import ids
from turnstream.errors import NotReadyError, StoreFullError, StoreUnavailableError, TurnstreamError
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.tasks import Prompt, add_prompts
from turnstream_server.batcher.serving.health import NOTE
from turnstream_server.jobs.ledger import ledger_json, print_ledger
from turnstream_server.jobs.why import reasons_json

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

NUM_OPEN = 8


class FullStore:
    """A run whose open trajectories have filled the store, and their publisher."""

    def __init__(self, house: Any, client: redis.Redis) -> None:
        self.client = client
        self.run = house.create_run(batch_groups=NUM_OPEN)
        add_prompts(client, self.run, [Prompt(prompt_uid="p", payload=b"", num_samples=2)])
        self.publisher = Publisher(
            house.url, self.run, writer="gen-7", timeout_s=2.5, admission_timeout_s=1.5
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
def full(house: Any) -> Iterator[FullStore]:
    with connect(house.url) as client:
        store = FullStore(house, client)
        yield store
        store.close()


@pytest.fixture
async def full_with_batcher(house: Any) -> AsyncIterator[tuple[FullStore, Any, Any]]:
    replica = await house.start_batcher()
    with connect(house.url) as client:
        store = await asyncio.to_thread(FullStore, house, client)
        trainer = house.trainer(replica, store.run)
        await trainer.start()
        store.fill()
        yield store, replica, trainer
        await asyncio.to_thread(store.close)


def says_full(text: str) -> bool:
    """Whether a sentence names the bytes used and allowed, and what holds them, by type."""
    names = ("full", "it uses ", "maxmemory is ", "by open trajectories", "by sealed ones")
    return all(name in text for name in names) and "away" not in text


def test_publisher_waits_on_full_store_say_full(full: FullStore) -> None:
    # Every wait said that the store was away, with StoreUnavailableError: "the store has taken
    # nothing for 2.0 s: OOM command not allowed".
    full.fill()
    full.writers[0].append([1] + [2] * 3000 + [3], [4] * 3000, policy_version=0)

    with pytest.raises(NotReadyError) as flushed:
        full.publisher.flush(timeout_s=1.5)
    with pytest.raises(StoreFullError) as sealed:
        full.writers[0].seal(reward=1.0)

    for error in (flushed.value, sealed.value):
        assert [reason.kind for reason in error.reasons] == ["not_acknowledged", "store_full"]
        assert says_full(error.reasons[1].sentence)
        reserved = error.reasons[1].facts["reserved"]
        assert isinstance(reserved, int)
        assert reserved >= NUM_OPEN * 16_384
    assert says_full(str(sealed.value))


def test_group_and_task_waits_on_full_store_say_full(full: FullStore) -> None:
    # A group ended with StoreUnavailableError, and took all unacknowledged writes of its publisher
    # with it; a task was refused at once.
    full.fill()

    with pytest.raises(NotReadyError) as grouped, full.publisher.group("new", 2):
        pass
    with pytest.raises(NotReadyError) as tasked:
        full.publisher.next_task(wait_s=0.5)

    for error, kind in ((grouped.value, "no_leave"), (tasked.value, "no_task")):
        assert [reason.kind for reason in error.reasons[:2]] == [kind, "store_full"]
        assert all(says_full(reason.sentence) for reason in error.reasons[:2])


def test_group_begins_once_a_full_store_has_memory_again(full: FullStore) -> None:
    full.fill()
    waiting = full.publisher.trajectory("new", 0, num_samples=1)
    full.client.config_set("maxmemory", 0)

    with waiting:
        waiting.append(ids("ab"), ids("c"))
        waiting.seal(reward=1.0)

    assert waiting.has_ended


def test_refused_call_on_full_store_names_bytes_and_holders(full: FullStore) -> None:
    # The error was "OOM command not allowed when used memory > 'maxmemory'".
    full.fill()

    with pytest.raises(StoreFullError) as refused:
        add_prompts(full.client, full.run, [Prompt(prompt_uid="q", payload=b"", num_samples=2)])

    assert says_full(str(refused.value))
    assert not isinstance(refused.value, StoreUnavailableError)


def test_why_and_ledger_of_full_store_say_full(full: FullStore, house: Any) -> None:
    # `why` named the missing planner and each open member first, and then some bytes.
    full.fill()
    console = Console(record=True, width=300)

    found = json.loads(reasons_json(house.url, full.run))["reasons"]
    print_ledger(house.url, full.run, console)

    assert found[0]["kind"] == "store_full"
    assert says_full(found[0]["sentence"])
    assert "out_of_bytes" not in {each["kind"] for each in found}
    assert says_full(console.export_text().splitlines()[-1])
    assert says_full(json.loads(ledger_json(house.url, full.run))["full"])


def test_why_says_full_where_open_trajectories_hold_the_budget(house: Any) -> None:
    # Bytes came after the planner, the trainer and each open trajectory.
    run = house.create_run(batch_groups=2, max_staleness=9, max_bytes=300_000)
    with (
        connect(house.url) as client,
        Publisher(house.url, run) as publisher,
        publisher.group("g0", 2),
        publisher.group("g1", 2),
    ):
        client.hset(keys.run_keys(run).frontier, "planned", 2)

        found = json.loads(reasons_json(house.url, run))["reasons"]

        assert found[0]["kind"] == "store_full"
        assert found[0]["sentence"].startswith(
            "the byte budget of the run is full: 262,144 of max_bytes=300,000 are held, "
            "262,144 bytes by open trajectories"
        )


async def test_batcher_of_full_store_says_full(
    full_with_batcher: tuple[FullStore, Any, Any],
) -> None:
    # A Get that ended named too few groups and open members; health named nothing.
    _, replica, trainer = full_with_batcher

    told = await trainer.refused(1, words="step 1: 0 of 8 groups complete")
    state, note = await _check(replica.address)

    assert told.reasons[0].kind == "store_full"
    assert says_full(told.reasons[0].sentence)
    assert state == HealthCheckResponse.SERVING
    assert says_full(note)


async def _check(address: str) -> tuple[int, str]:
    """Return the state and the note of the first Check that has one."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = HealthStub(channel)
        for _ in range(600):
            call = stub.Check(HealthCheckRequest(), timeout=60)
            state = (await call).status
            note = str(dict(await call.trailing_metadata()).get(NOTE, ""))
            if note:
                return state, note
            await asyncio.sleep(0.1)
    raise TurnstreamError("no note within 60 s")
