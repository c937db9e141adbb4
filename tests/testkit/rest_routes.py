"""The routes of a gateway's applications, without a gateway that answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from turnstream.store.client.connection import connect_async
from turnstream_server.gateway.config import GatewayOptions
from turnstream_server.gateway.state import Gateway


def unused_gateway() -> Gateway:
    """Return the state of a gateway whose store does not exist."""
    url = "redis://127.0.0.1:1"
    return Gateway(GatewayOptions(redis_url=url), connect_async(url), cast("Any", None))


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
