"""Fixtures of gateways, which a family's conftest.py assigns to the names of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from testkit.gateway_thread import GatewayThread
from turnstream_server.embedded import EmbeddedServer


@pytest.fixture
def new_gateway(server: EmbeddedServer) -> Iterator[Callable[..., GatewayThread]]:
    """`new_gateway(requires_key=True)` starts a gateway on the shared store."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(GatewayThread(server.url, **options))


@pytest.fixture
def gateway(new_gateway: Callable[..., GatewayThread]) -> GatewayThread:
    """A gateway with the options of the tests."""
    return new_gateway()
