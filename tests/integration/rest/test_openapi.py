"""Requests that schemathesis makes from the OpenAPI document of the REST API.

No answer may be a 5xx, or one that the document does not describe. The requests are always the
same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.generation.drivers import CoverageGenerator
from schemathesis.generation.feedback import NO_FEEDBACK
from schemathesis.generation.overrides import Override
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from testkit.services.gateway_thread import GatewayThread
from testkit.services.gateways import unused_gateway
from turnstream_server.batcher.assembly.assembler import read_share
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.rest.app import PREFIX, make_rest_app

CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]

RUN: Final = "demo"
"""Name of a run in the examples of the document; it exists before each request that names it."""

WITHOUT_END: Final = "/runs/{run}/events"
"""A stream that ends with its run; its names are of runs that do not exist."""

WAIT: Final = "wait_s"
NUM_RANDOM: Final = settings().max_examples // 4
NUM_BOUNDARIES: Final = 80
"""Requests with boundary and wrong values, at most, of one operation."""

MAX_ITEMS: Final = 100
"""Longer lists take seconds each."""

ARGUMENTS: Final = ("method", "path")


DOCUMENT: Final = make_rest_app(unused_gateway()).openapi()
OPERATIONS: Final = [
    (method, path) for path, operations in DOCUMENT["paths"].items() for method in operations
]


class Api(NamedTuple):
    """A gateway, and the operations of its document."""

    base_url: str
    session: requests.Session
    schema: Any

    def check(self, case: Any) -> None:
        """Send a request and check its answer."""
        _end_soon(case)
        if (case.path_parameters or {}).get("run") == RUN:
            new = {"name": RUN, "settings": {"batch_groups": 2}}
            self.session.post(f"{self.base_url}/runs", json=new, timeout=60)
        answer = case.call(base_url=self.base_url, session=self.session, timeout=60)
        case.validate_response(answer, checks=CHECKS)


def _end_soon(case: Any) -> None:
    """Change a request that would be held; values that are refused stay."""
    for fields in (case.query, case.body):
        if isinstance(fields, dict) and _is_wait(fields.get(WAIT)):
            fields[WAIT] = 0
    if case.path == WITHOUT_END:
        case.path_parameters["run"] = f"absent-{case.path_parameters['run']}"


def _is_wait(value: Any) -> bool:
    """Return whether this is a positive number, in JSON or in a query."""
    try:
        return not isinstance(value, bool) and float(value) > 0
    except (TypeError, ValueError):
        return False


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    """A gateway on a store of its own."""
    with (
        EmbeddedServer() as store,
        GatewayThread(store.url, read_share=partial(read_share, store.url)) as gateway,
        requests.Session() as session,
    ):
        yield Api(f"{gateway.base_url}{PREFIX}", session, schemathesis.openapi.from_dict(DOCUMENT))


def test_components_keep_the_names_of_generated_clients() -> None:
    names = DOCUMENT["components"]["schemas"]

    assert {"Reason-Input", "Reason-Output", "Why", "Closing", "Problem"} <= names.keys()


@pytest.mark.hypothesis
@pytest.mark.parametrize(ARGUMENTS, OPERATIONS)
def test_random_requests_have_documented_answers(api: Api, method: str, path: str) -> None:
    @given(case=api.schema[path][method].as_strategy())
    @settings(
        max_examples=NUM_RANDOM,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
        ],
    )
    def check(case: Any) -> None:
        names = case.path_parameters or {}
        if "run" in names and len(names["run"]) % 2:
            names["run"] = RUN
        api.check(case)

    check()


@pytest.mark.parametrize(ARGUMENTS, OPERATIONS)
def test_boundary_values_have_documented_answers(api: Api, method: str, path: str) -> None:
    found = [case for case in boundary_cases(api.schema[path][method]) if _is_short(case.body)]
    step = -(-len(found) // NUM_BOUNDARIES)
    for case in found[::step]:
        api.check(case)


def boundary_cases(operation: Any) -> Iterator[Any]:
    """Yield the examples of an operation with one value changed: to a limit, or to a wrong one."""
    config = operation.schema.config.generation_for(operation=operation, phase="coverage")
    yield from CoverageGenerator(
        operation=operation,
        generation_modes=list(GenerationMode),
        generation_config=config,
        auth_storage=None,
        feedback=NO_FEEDBACK,
        override=Override(query={}, headers={}, cookies={}, path_parameters={}),
    )


def _is_short(body: Any) -> bool:
    values = body.values() if isinstance(body, dict) else ()
    return all(len(each) <= MAX_ITEMS for each in values if isinstance(each, list))
