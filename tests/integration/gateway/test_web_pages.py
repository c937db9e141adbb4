"""Requests that a browser sends on behalf of a foreign web page."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import httpx2
import pytest

from testkit.services.gateway_thread import GatewayThread
from testkit.services.gateways import tinker_paths, unused_gateway
from turnstream_server.gateway.rest.app import PREFIX, make_rest_app

pytestmark = pytest.mark.redis

_FOREIGN: Final = "http://pages.example"


def _routes() -> list[tuple[str, str]]:
    """Return method and path of every route, and of paths without a route."""
    rest = make_rest_app(unused_gateway()).openapi()["paths"]
    found = [(method, path) for path, methods in tinker_paths().items() for method in methods]
    found += [(method, PREFIX + path) for path, methods in rest.items() for method in methods]
    others = [("get", f"{PREFIX}/openapi.json"), ("post", "/none"), ("options", f"{PREFIX}/runs")]
    return [*found, *others]


def test_foreign_page_reaches_no_route(gateway: GatewayThread) -> None:
    pages = (
        {"Host": "pages.example:7601", "Origin": "http://pages.example:7601"},
        {"Host": "127.0.0.1.pages.example"},
        {"Origin": _FOREIGN},
        {"Origin": "null"},
        {"Origin": gateway.base_url + "1"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    )
    routes = [(method, re.sub(r"{\w+}", "x", path)) for method, path in _routes()]
    with httpx2.Client(base_url=gateway.base_url) as http:
        found = {
            (method, path): {http.request(method, path, headers=page).status_code for page in pages}
            for method, path in routes
        }
        plain = {"Content-Type": "text/plain;charset=UTF-8"}
        posts = [path for method, path in routes if method == "post"]
        bodies = {path: http.post(path, content=b"{}", headers=plain) for path in posts}
        forms = [http.post(path, data={"name": "x"}).status_code for path in posts[:2]]

    assert len(found) > 60
    assert {each: statuses for each, statuses in found.items() if statuses != {403}} == {}
    assert {path: answer.status_code for path, answer in bodies.items()} == dict.fromkeys(
        posts, 415
    )
    assert forms == [415, 415]


def test_own_page_and_names_of_the_setting_are_accepted(
    new_gateway: Callable[..., GatewayThread],
) -> None:
    own, with_keys = new_gateway(names=frozenset({"gw.lab"})), new_gateway(requires_key=True)
    accepted = (
        {},
        {"Host": "localhost:1"},
        {"Host": "[::1]"},
        {"Host": "10.0.0.7:7601"},
        {"Host": "GW.lab", "Origin": "https://gw.lab"},
        {"Origin": own.base_url, "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},  # a link
    )

    for headers in accepted:
        answer = httpx2.get(f"{own.base_url}/healthz", headers=headers)
        assert answer.status_code == 200, headers
    foreign = httpx2.get(f"{with_keys.base_url}/healthz", headers={"Host": "any.example"})
    page = httpx2.get(f"{with_keys.base_url}/healthz", headers={"Origin": _FOREIGN})
    refused = httpx2.get(f"{own.base_url}/v1/runs", headers={"Host": "gw.example"})
    # A page needs a key here, and does not have it: every name is accepted, and no foreign origin.
    assert (foreign.status_code, page.status_code) == (200, 403)
    assert refused.json()["detail"] == (
        "Host is 'gw.example': web pages of other servers may not use this gateway; "
        "TURNSTREAM_HTTP_NAMES has the names under which it is reached"
    )
