"""A gateway on a real store and a real socket, with a worker of canned results."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest

from testkit.requests.tinker_api import Api
from testkit.services import gateways, servers
from testkit.services.gateway_thread import GatewayThread
from testkit.training.canned_worker import BASE, CannedWorker
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.operations.models import BaseModel

_numbers = itertools.count(1)


server = servers.shared_server
new_gateway, gateway = gateways.new_gateway, gateways.gateway


@pytest.fixture
def base() -> BaseModel:
    """A base model that no other test uses."""
    return BASE._replace(name=f"tiny/gateway-{next(_numbers)}")


@pytest.fixture
def worker(server: EmbeddedServer, base: BaseModel) -> Iterator[CannedWorker]:
    with CannedWorker(server.url, base) as worker:
        yield worker


@pytest.fixture
def new_api(base: BaseModel) -> Iterator[Callable[..., Api]]:
    """`new_api(gateway, key=...)` returns a client of a gateway."""
    with contextlib.ExitStack() as stack:

        def make(gateway: GatewayThread, *, key: str = "tml-own") -> Api:
            api = Api(gateway, base, key=key)
            stack.enter_context(api.http)
            return api

        yield make


@pytest.fixture
def api(gateway: GatewayThread, worker: CannedWorker, new_api: Callable[..., Api]) -> Api:
    return new_api(gateway)
