"""A gateway on a real store and a real socket, for the routes below `/v1`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import redis

from testkit.gateway_thread import GatewayThread
from testkit.ingest import IngestClient
from testkit.stores import RunReader
from turnstream.store.client.connection import connect
from turnstream_server.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """One kind of server: the tests of the scripts run on each kind."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with connect(server.url) as client:
        yield client


@pytest.fixture
def new_gateway(server: EmbeddedServer) -> Iterator[Callable[..., GatewayThread]]:
    """`new_gateway(max_body_bytes=...)` starts a gateway on the store."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(GatewayThread(server.url, **options))


@pytest.fixture
def gateway(new_gateway: Callable[..., GatewayThread]) -> GatewayThread:
    return new_gateway()


@pytest.fixture
def ingest(
    gateway: GatewayThread, client: redis.Redis, new_run: Callable[..., str]
) -> Iterator[IngestClient]:
    """A client of a new run, with the writer name "test"."""
    with IngestClient(gateway, new_run(client)) as ingest:
        yield ingest


@pytest.fixture
def reader(client: redis.Redis, ingest: IngestClient) -> RunReader:
    """The run of `ingest`, as the store has it."""
    return RunReader(client, ingest.run)
