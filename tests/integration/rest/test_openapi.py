"""Requests that schemathesis makes from the OpenAPI document of the REST API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from testkit.gateway_thread import GatewayThread
from turnstream_server.batcher.assembly.assembler import read_share
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.rest.app import PREFIX, ROUTERS

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
SEPARATE = {"/runs/{run}/events", "/store"}
"""A stream without an end, and bodies that are no JSON: they have tests of their own."""

OPERATIONS = sorted(
    (method, re.sub(r":\w+}", "}", route.path))
    for router in ROUTERS
    for route in router.routes
    if route.path not in SEPARATE  # pyright: ignore[reportAttributeAccessIssue]
    for method in route.methods  # pyright: ignore[reportAttributeAccessIssue]
)


class Api(NamedTuple):
    """A gateway, and its document with a run `conformance` in place of any name."""

    base_url: str
    document: Any


@pytest.fixture(scope="module")
def api(server: EmbeddedServer) -> Iterator[Api]:
    with GatewayThread(server.url, read_share=partial(read_share, server.url)) as gateway:
        base_url = f"{gateway.base_url}{PREFIX}"
        document = httpx2.get(f"{base_url}/openapi.json").json()
        yield Api(base_url, schemathesis.openapi.from_dict(document))


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_is_a_server_error_or_undocumented(api: Api, method: str, path: str) -> None:
    operation = api.document[path][method]

    @given(case=operation.as_strategy())
    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        if "run" in case.path_parameters and len(case.path_parameters["run"]) % 2:
            case.path_parameters["run"] = "conformance"  # a run that exists
        for name in ("wait_s", "timeout_s"):
            if name in (case.query or {}):
                case.query[name] = 0
        httpx2.post(
            f"{api.base_url}/runs", json={"name": "conformance", "settings": {"batch_groups": 2}}
        )
        response = case.call(base_url=api.base_url, timeout=30)
        case.validate_response(response, checks=CHECKS)

    check()
