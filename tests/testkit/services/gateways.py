"""Gateways and their routes, and fixtures that a conftest.py assigns to the names of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from fastapi.openapi.utils import get_openapi

from testkit.services.gateway_thread import GatewayThread
from turnstream.store.client.connection import connect_async
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.app import make_app
from turnstream_server.gateway.config import GatewayOptions
from turnstream_server.gateway.polls import Polls
from turnstream_server.gateway.state import Gateway


def unused_gateway() -> Gateway:
    """Return the state of a gateway whose store does not exist."""
    url = "redis://127.0.0.1:1"
    client = connect_async(url)
    return Gateway(GatewayOptions(redis_url=url), client, Polls(client, client))


def tinker_paths() -> dict[str, dict[str, Any]]:
    """Return the paths of the Tinker API, each with its methods."""
    return get_openapi(title="", version="", routes=make_app(unused_gateway()).routes)["paths"]


def routes_of(routes: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield method and path of each route, those of included routers and mounted apps too."""
    for each in routes:
        if (router := getattr(each, "original_router", None)) is not None:
            yield from routes_of(router.routes, prefix + each.include_context.prefix)
        elif not hasattr(each, "methods"):
            yield from routes_of(each.app.routes, prefix + each.path)
        else:
            for method in sorted(each.methods - {"HEAD", "OPTIONS"}):
                yield method, prefix + each.path


@pytest.fixture
def new_gateway(server: EmbeddedServer) -> Iterator[Callable[..., GatewayThread]]:
    """`new_gateway(requires_key=True)` starts a gateway on the shared store."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(GatewayThread(server.url, **options))


@pytest.fixture
def gateway(new_gateway: Callable[..., GatewayThread]) -> GatewayThread:
    """A gateway with the options of the tests."""
    return new_gateway()
