"""Fixtures of gateways, which a family's conftest.py assigns to the names of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis.asyncio
from fastapi.openapi.utils import get_openapi

from testkit.gateway_thread import GatewayThread
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.app import make_app
from turnstream_server.gateway.config import GatewayOptions
from turnstream_server.gateway.polls import Polls
from turnstream_server.gateway.state import Gateway


def idle_gateway() -> Gateway:
    """Return the state of a gateway that no request reaches."""
    url = "redis://127.0.0.1:1"
    client = redis.asyncio.Redis.from_url(url)
    return Gateway(GatewayOptions(redis_url=url), client, Polls(client, client))


def tinker_paths() -> dict[str, dict[str, Any]]:
    """Return the paths of the Tinker API, each with its methods."""
    return get_openapi(title="", version="", routes=make_app(idle_gateway()).routes)["paths"]


@pytest.fixture
def new_gateway(server: EmbeddedServer) -> Iterator[Callable[..., GatewayThread]]:
    """`new_gateway(requires_key=True)` starts a gateway on the shared store."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(GatewayThread(server.url, **options))


@pytest.fixture
def gateway(new_gateway: Callable[..., GatewayThread]) -> GatewayThread:
    """A gateway with the options of the tests."""
    return new_gateway()
