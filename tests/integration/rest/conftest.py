"""A gateway on a real store and a real socket, for the routes below `/v1`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from testkit.requests.ingest import IngestClient
from testkit.requests.rest_api import RestApi
from testkit.services import gateways, servers
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader

server = servers.shared_server
new_gateway, gateway = gateways.new_gateway, gateways.gateway


@pytest.fixture
def ingest(
    gateway: GatewayThread, client: redis.Redis, new_run: Callable[..., str]
) -> Iterator[IngestClient]:
    """A client of a new run, with the writer name "test"."""
    with IngestClient(gateway, new_run(client)) as ingest:
        yield ingest


@pytest.fixture
def api(gateway: GatewayThread) -> Iterator[RestApi]:
    """A client of the gateway, with the writer name "test"."""
    with RestApi(gateway, writer="test") as api:
        yield api


@pytest.fixture
def run(client: redis.Redis, new_run: Callable[..., str]) -> str:
    """A new run."""
    return new_run(client)


@pytest.fixture
def reader(client: redis.Redis, ingest: IngestClient) -> RunReader:
    """The run of `ingest`, as the store has it."""
    return RunReader(client, ingest.run)
