"""The calls of a service and its runs over HTTP: pages, held requests, processes, other servers."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
import redis
from starlette.datastructures import Headers
from starlette.responses import Response

import turnstream
from testkit.services.gateway_thread import GatewayThread
from testkit.services.inference_servers import serving
from testkit.services.processes import in_fork
from turnstream.errors import (
    AccessDeniedError,
    RejectedError,
    StoreUnavailableError,
    TurnstreamError,
    UnknownKeyError,
    WaitKind,
)
from turnstream.generator import Prompt
from turnstream.http import gateway_calls
from turnstream.http.client import GatewayClient
from turnstream.http.problems import HEADER, WIRE_VERSION
from turnstream.store.client import keys

pytestmark = pytest.mark.redis


@pytest.fixture
def service(gateway: GatewayThread) -> Iterator[turnstream.Service]:
    with turnstream.connect(gateway.base_url) as service:
        yield service


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Method and path of the requests of all clients, in order."""
    sent: list[str] = []
    call = GatewayClient.call

    def recording(client: GatewayClient, method: str, path: str, **options: Any) -> Any:
        sent.append(f"{method} {path}")
        return call(client, method, path, **options)

    monkeypatch.setattr(GatewayClient, "call", recording)
    return sent


def test_many_prompts_are_sent_in_several_requests_and_added_once(
    service: turnstream.Service,
    client: redis.Redis,
    new_name: str,
    requests: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = service.create_run(new_name, batch_groups=8)
    prompts = [
        Prompt(prompt_uid=f"p{n}", payload=b"\xff" * (300_000 if n < 4 else 9), num_samples=1)
        for n in range(40)
    ]
    monkeypatch.setattr(gateway_calls, "_MAX_PROMPTS", 30)
    del requests[:]

    assert run.add_prompts(prompts) == 40
    num_requests = len(requests)
    assert run.add_prompts(prompts, first=1) == 40
    assert run.add_prompts(prompts[:2]) == 42

    stored: Any = client.hgetall(keys.run_keys(new_name).prompts)
    records = [stored[str(number).encode()] for number in range(1, 43)]
    assert records == [b"1/1:p%d:%s" % (n, prompts[n].payload) for n in (*range(40), 0, 1)]
    assert num_requests == 2 + 3  # the settings and the number; then 2, 30 and 8 prompts


def test_wait_for_a_version_is_held_and_ends_at_once(
    service: turnstream.Service, gateway: GatewayThread, new_name: str, requests: list[str]
) -> None:
    run = service.create_run(new_name, batch_groups=8)
    found: list[Any] = []
    del requests[:]
    waiting = threading.Thread(target=lambda: found.append(run.wait_for_version(timeout_s=60)))
    waiting.start()
    while not gateway.num_requests:
        time.sleep(0.01)
    path = f"{gateway.base_url}/v1/runs/{quote(new_name)}/versions"
    assert httpx2.post(path, json={"version": 3}).is_success
    waiting.join(30)

    assert [each.version for each in found] == [3]
    assert len(requests) == 1
    assert run.wait_for_version(above=2).version == 3


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_service_works_in_a_fork_after_close_and_from_a_pickle(
    service: turnstream.Service, new_name: str
) -> None:
    run = service.create_run(new_name, batch_groups=8)

    def check() -> None:
        assert run.credit().num_groups == service.run(new_name).credit().num_groups == 16

    assert in_fork(check) == "ok"
    check()
    service.close()
    service.close()
    check()
    copied = pickle.loads(pickle.dumps(run))
    assert copied.credit() == run.credit()
    assert pickle.loads(pickle.dumps(service)).runs() == service.runs()


# ------------------------------------------------------------------------------ other servers


class OtherServer:
    """Answers with the next of some statuses, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], str]] = []
        self.seen: list[Headers] = []
        self.ports: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        self.seen.append(Headers(scope=scope))
        self.ports.append(scope["client"][1])
        status, headers, body = self.answers[0]
        if len(self.answers) > 1:
            self.answers.pop(0)
        await Response(body, status, headers)(scope, receive, send)


@pytest.fixture
def other_server() -> Iterator[tuple[str, OtherServer]]:
    """The address of another server, and the server."""
    server = OtherServer()
    with serving(server) as url:
        yield url, server


_JSON = {"Content-Type": "application/json"}
_PROBLEM = {"Content-Type": "application/problem+json"}
_PONG = (200, _JSON, "{}")

CASES: list[tuple[list[tuple[int, dict[str, str], str]], type[TurnstreamError], str, int]] = [
    ([(404, {}, "no")], RejectedError, "is no gateway of this release: HTTP 404 at /v1/ping", 1),
    ([(405, _JSON, '{"x": 1}')], RejectedError, "is no gateway of this release", 1),
    ([(200, {"Content-Type": "text/html"}, "<p>")], RejectedError, "is no gateway of this", 1),
    ([(301, {"Location": "/x"}, "")], RejectedError, "refers to '/x'", 1),
    ([(401, _PROBLEM, '{"detail": "no key"}')], UnknownKeyError, "no key", 1),
    ([(407, {}, "")], AccessDeniedError, "a proxy denied access", 1),
    ([(400, _PROBLEM, '{"detail": "why", "type": "about:blank"}')], RejectedError, "400: why", 1),
    ([(502, {}, "")], StoreUnavailableError, "no gateway answers at 127.0.0.1", 4),
    ([(504, {}, "")], StoreUnavailableError, "HTTP 504", 1),
    ([(429, {"Retry-After": "99"}, "")], RejectedError, "HTTP 429", 1),
]


def test_answers_of_other_servers_are_typed_errors(other_server: tuple[str, OtherServer]) -> None:
    url, server = other_server
    for answers, kind, text, num_requests in CASES:
        server.answers[:], server.seen[:] = answers, []
        with pytest.raises(TurnstreamError) as raised:
            turnstream.connect(url)
        found = type(raised.value), text in str(raised.value), len(server.seen)
        assert found == (kind, True, num_requests), (answers, raised.value)


def test_lost_connections_and_limits_are_repeated_with_the_wire_version(
    other_server: tuple[str, OtherServer],
) -> None:
    url, server = other_server
    soon = {"Retry-After": "0"}
    server.answers[:] = [(503, {}, ""), (429, soon, ""), (425, {}, ""), (429, soon, ""), _PONG]

    turnstream.connect(url, api_key="tml-x").close()

    assert len(server.seen) == 5
    assert {each[HEADER] for each in server.seen} == {str(WIRE_VERSION)}
    assert {each["X-API-Key"] for each in server.seen} == {"tml-x"}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_has_a_connection_of_its_own(other_server: tuple[str, OtherServer]) -> None:
    url, server = other_server
    server.answers[:] = [_PONG]
    with turnstream.connect(url) as service:
        assert in_fork(service.ping) == "ok"
        service.ping()

    parent, child, again = server.ports
    assert parent == again != child


def test_silent_gateway_is_asked_once(
    service: turnstream.Service, new_name: str, requests: list[str]
) -> None:
    run = service.create_run(new_name, batch_groups=8)
    hold = "turnstream_server.gateway.rest.runs.versions._awaited"

    async def never(*_: Any, **__: Any) -> None:
        await asyncio.sleep(60)

    del requests[:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hold, never)
        with pytest.raises(StoreUnavailableError, match=r"no version above -1: the store at") as it:
            run.wait_for_version(timeout_s=0.2)

    assert [each.kind for each in it.value.reasons] == [WaitKind.NOT_READY, WaitKind.STORE_AWAY]
    assert len(requests) == 1
