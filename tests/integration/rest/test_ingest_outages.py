"""Ingest while the store is full or away, and after it was killed."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
import redis

from testkit.requests.ingest import IngestClient
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from testkit.turns import turn
from testkit.waiting import wait_until
from turnstream.batching.config import BatchingConfig
from turnstream.store.run.runs import create_run
from turnstream.types import TrajectoryKey
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.rest.ingest import writes


@pytest.fixture
def ingest(
    own_server: EmbeddedServer, own_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> Iterator[IngestClient]:
    """A client of the run "run", with an open trajectory of one turn."""
    monkeypatch.setattr(writes, "STORE_TIMEOUT_S", 0.5)
    create_run(own_client, "run", BatchingConfig(batch_groups=8, mini_batch_groups=8))
    with GatewayThread(own_server.url) as gateway, IngestClient(gateway, "run") as ingest:
        ingest.turn(0, turn("ab", "CD", logprobs=-0.5))
        yield ingest


def test_full_store_is_429_and_takes_the_turn_later(
    ingest: IngestClient, own_client: redis.Redis
) -> None:
    own_client.config_set("maxmemory", 1)

    full = _post(ingest, 1)
    own_client.config_set("maxmemory", 0)
    after = ingest.turn(1, turn("abcde", "F"))

    assert (full.status_code, full.headers["Retry-After"]) == (429, "1")
    assert full.json()["type"].endswith("/store-full")
    assert after["status"] == 201
    assert len(RunReader(own_client, "run").turns(TrajectoryKey("g", 0))) == 2


def test_killed_store_is_503_and_keeps_what_was_acknowledged(
    ingest: IngestClient, own_server: EmbeddedServer, own_client: redis.Redis
) -> None:
    own_server.kill()

    away = _post(ingest, 1)
    own_server.restart()
    wait_until(lambda: _post(ingest, 1).status_code == 200, describe="the store")
    end = ingest.turn(1, turn("abcde", "F"), seal={"reward": 1.0})

    assert (away.status_code, end["status"]) == (503, 201)
    reader = RunReader(own_client, "run")
    assert reader.states() == {"g/0/0": "sealed"}
    assert reader.spelled(TrajectoryKey("g", 0)) == [("ab", "cd"), ("abcde", "f")]


def _post(ingest: IngestClient, number: int) -> httpx2.Response:
    fields = {"prompt_ids": [97, 98, 99, 100, 101], "response_ids": [102]}
    item = {"group_id": "g", "sample": 0, "num_samples": 1, "turn": number, **fields}
    return ingest.post("turns", item)
