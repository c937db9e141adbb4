"""The calls of a service and its runs: to the store, or to a gateway. Here it is decided which."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from turnstream.optional import from_extra
from turnstream.store.client.addresses import is_http
from turnstream.store.service_calls import StoreCalls

if TYPE_CHECKING:
    from turnstream.http.gateway_calls import GatewayCalls

Calls: TypeAlias = "StoreCalls | GatewayCalls"
"""Both have the same methods. A call of a run has the id of the run, and raises RunNotFoundError
after its deletion."""


def connect_calls(url: str) -> Calls:
    """Return the calls to the store or the gateway at an address; the first one connects."""
    if not is_http(url):
        return StoreCalls(url)
    # Here and not above: the package for HTTP is an extra.
    with from_extra("http", needed_by="an address that begins with http"):
        from turnstream.http.gateway_calls import GatewayCalls
    return GatewayCalls(url)
