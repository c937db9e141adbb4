"""Every route below `/v1` refuses keys that may not use it.

The routes are those of the application, so that a new one cannot be left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import httpx2
import pytest
import redis

from testkit import wait_until
from testkit.services.gateway_thread import GatewayThread
from testkit.services.gateways import routes_of, unused_gateway
from turnstream.generator.transport.messages import MEDIA_TYPE as CALLS
from turnstream.store.client.connection import connect
from turnstream.wire.v1 import calls_pb2 as wire
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.rest.app import make_rest_app
from turnstream_server.keys.records import ROLES
from turnstream_server.keys.store import create_key, revoke_key

PUBLIC: Final = {("GET", "/openapi.json")}
WITHOUT_RUN: Final = {
    *(("GET", path) for path in ("/ping", "/batchers", "/runs")),
    *(("POST", path) for path in ("/runs", "/calls")),
}
"""Routes whose path names no run; each has a test of its own for a key of another run."""

OF_EVERY_ROLE: Final = {("POST", "/calls")}
"""Routes that check the role of each part of a request."""

ROLES_OF: Final = {
    **{("GET", path): {*ROLES} for path in ("/ping", "/runs")},
    **{("GET", f"/runs/{{run}}/{name}"): {*ROLES} for name in ("config", "credit", "versions")},
    ("GET", "/batchers"): {"train", "admin"},
}
"""Roles of the reads that more than the role `read` may do, or another role."""

RUN: Final = "walked"
OTHER: Final = "walked-other"


class Request(NamedTuple):
    """A request of a route, and the path of the route."""

    method: str
    path: str
    route: str

    @property
    def name(self) -> tuple[str, str]:
        """Return method and path of the route."""
        return self.method, self.route


def request_of(method: str, route: str) -> Request:
    path = re.sub(r"\{(\w+)[^}]*\}", lambda found: RUN if found[1] == "run" else "1", route)
    return Request(method, path, route)


REQUESTS: Final = [
    request_of(method, route) for method, route in routes_of(make_rest_app(unused_gateway()).routes)
]
GUARDED: Final = [each for each in REQUESTS if each.name not in PUBLIC]


@pytest.fixture(scope="module")
def store() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture(scope="module")
def own_client(store: EmbeddedServer) -> Iterator[redis.Redis]:
    with connect(store.url) as client:
        yield client


@pytest.fixture(scope="module")
def http(store: EmbeddedServer) -> Iterator[httpx2.Client]:
    with (
        GatewayThread(store.url, requires_key=True) as gateway,
        httpx2.Client(base_url=f"{gateway.base_url}/v1", timeout=60) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def secrets(own_client: redis.Redis) -> dict[str, str]:
    """The secrets of keys by their names."""
    made = {role: create_key(own_client, role, roles=[role], runs=[RUN]) for role in ROLES}
    made["other"] = create_key(own_client, "other", roles=ROLES, runs=[OTHER])
    made["revoked"] = create_key(own_client, "revoked", roles=ROLES)
    made["expired"] = create_key(own_client, "expired", roles=ROLES, expires_s=0.001)
    revoke_key(own_client, "revoked")
    return {**made, "missing": "", "unknown": "tml-" + "u" * 43}


def status(http: httpx2.Client, request: Request, secret: str, **fields: Any) -> int:
    """Return the status of a request with this key; a refusal is a problem document."""
    headers = {"X-API-Key": secret} if secret else {}
    json = fields if request.method in ("POST", "PATCH", "PUT") else None
    response = http.request(request.method, request.path, headers=headers, json=json)
    if response.status_code in (401, 403):
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["status"] == response.status_code
    if response.status_code == 401:
        assert response.headers["www-authenticate"] == "Bearer"
    return response.status_code


@pytest.mark.parametrize("request_", GUARDED, ids=lambda each: " ".join(each.name))
def test_route_refuses_keys_that_are_not_accepted(
    http: httpx2.Client, secrets: dict[str, str], request_: Request
) -> None:
    wait_until(lambda: status(http, request_, secrets["expired"]) == 401)
    for name in ("missing", "unknown", "expired", "revoked"):
        assert status(http, request_, secrets[name]) == 401, name
    assert status(http, request_, secrets["admin"]) not in (401, 403)


@pytest.mark.parametrize(
    "request_",
    [each for each in GUARDED if each.name not in OF_EVERY_ROLE],
    ids=lambda each: " ".join(each.name),
)
def test_route_refuses_keys_of_other_roles(
    http: httpx2.Client, secrets: dict[str, str], request_: Request
) -> None:
    accepted = {role for role in ROLES if status(http, request_, secrets[role]) != 403}

    if request_.method == "GET":
        assert accepted == ROLES_OF.get(request_.name, {"read", "admin"})
    else:
        assert len(accepted - {"admin"}) <= 1


@pytest.mark.parametrize(
    "request_",
    [each for each in GUARDED if each.name not in WITHOUT_RUN],
    ids=lambda each: " ".join(each.name),
)
def test_route_refuses_keys_of_another_run(
    http: httpx2.Client, secrets: dict[str, str], request_: Request
) -> None:
    assert "{run}" in request_.route, "add it to WITHOUT_RUN, and a test for another run"
    assert status(http, request_, secrets["other"]) == 403


def test_routes_without_a_run_refuse_other_runs(
    http: httpx2.Client, secrets: dict[str, str]
) -> None:
    create = Request("POST", "/runs", "/runs")
    settings = {"batch_groups": 1}
    assert status(http, create, secrets["other"], name=RUN, settings=settings) == 403
    assert status(http, create, secrets["admin"], name=RUN, settings=settings) == 201

    its, other = {"X-API-Key": secrets["read"]}, {"X-API-Key": secrets["other"]}
    for part in (RUN, f"{RUN}~1", f"{RUN}~2"):
        assert http.get(f"/runs/{part}/config", headers=its).status_code in (200, 404)
        assert http.get(f"/runs/{part}/config", headers=other).status_code == 403
    for part in (f"{RUN}%2Fconfig", f"{RUN}%2f..%2f{OTHER}", f"{OTHER}~1"):
        assert http.get(f"/runs/{part}/config", headers=its).status_code == 403, part

    found = http.get("/runs", headers=other)
    assert found.json() == {"runs": [], "next_run": None}
    assert [line["run"] for line in http.get("/runs", headers=its).json()["runs"]] == [RUN]

    body = wire.Calls(run=RUN).SerializeToString()
    headers = {"X-API-Key": secrets["other"], "Content-Type": CALLS}
    assert http.post("/calls", content=body, headers=headers).status_code == 403


def test_public_routes_are_known_and_need_no_key(http: httpx2.Client) -> None:
    assert {each.name for each in REQUESTS} > PUBLIC
    assert http.get("/openapi.json").json()["openapi"].startswith("3.")


def test_every_status_and_parameter_of_a_route_is_documented(http: httpx2.Client) -> None:
    document = http.get("/openapi.json").json()

    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            assert operation["description"], where
            assert {"401", "403", "404", "422", "429", "503"} <= operation["responses"].keys(), (
                where
            )
            for parameter in operation.get("parameters", ()):
                assert parameter.get("description"), (where, parameter["name"])
