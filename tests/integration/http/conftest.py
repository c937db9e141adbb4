"""A gateway on a real store and a real socket, for the SDK over HTTP, with the store beside it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import turnstream
from testkit import group, ids, wait_until
from testkit.requests.generator_calls import SETTINGS, write_everything
from testkit.requests.sent_calls import SESSION_RUN, Sent
from testkit.services import gateways, servers
from testkit.services.certificates import certificates as certificates
from testkit.services.gateway_thread import GatewayThread
from turnstream.errors import NotReadyError
from turnstream.wire.v1 import calls_pb2 as wire
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.rest.generators import route

_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def no_key_of_the_desk(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "KEY_FILE", "REDIS_URL", "TLS_CA"):
        monkeypatch.delenv(f"TURNSTREAM_{name}", raising=False)


server = servers.shared_server
new_gateway, gateway = gateways.new_gateway, gateways.gateway


@pytest.fixture
def url_of(server: EmbeddedServer, gateway: GatewayThread) -> Callable[[str], str]:
    """`url_of("http")` is the address of the gateway, `url_of("redis")` that of the store."""
    return {"redis": server.url, "http": gateway.base_url}.__getitem__


@pytest.fixture
def new_name() -> str:
    """The name of a run that does not exist."""
    return f"over http {next(_numbers)}"


def _recording(patch: pytest.MonkeyPatch) -> list[wire.Calls]:
    """Return the bodies that gateways of this process read from now on."""
    bodies: list[wire.Calls] = []
    read = route.read_calls

    def recording(body: bytes, key: Any) -> Any:
        bodies.append(wire.Calls.FromString(body))
        return read(body, key)

    patch.setattr(route, "read_calls", recording)
    return bodies


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[wire.Calls]:
    """The messages of every body that the gateway has read."""
    return _recording(monkeypatch)


@pytest.fixture(scope="module")
def sent(server: Any) -> dict[str, list[Sent]]:
    """The calls of a session with every call of the SDK, by their kinds."""
    with pytest.MonkeyPatch.context() as patch, GatewayThread(server.url) as gateway:
        bodies = _recording(patch)
        with turnstream.connect(gateway.base_url) as service:
            run = service.create_run(SESSION_RUN, **SETTINGS)
            write_everything(run)
            _wait_for_admission(run)
            with run.publisher() as publisher:
                open_ = publisher.trajectory("beats", 0, num_samples=1, purpose="eval")
                open_.append(ids("a"), ids("B")).result()
                wait_until(lambda: "renew_leases" in _kinds(bodies), describe="a heartbeat")
                open_.abandon("over")
                publisher.close_run("the end")
    found: dict[str, list[Sent]] = {}
    for body in bodies:
        for call in body.calls:
            found.setdefault(call.WhichOneof("kind") or "", []).append(Sent(body, call))
    return found


def _kinds(bodies: Sequence[wire.Calls]) -> set[str]:
    return {call.WhichOneof("kind") or "" for body in bodies for call in body.calls}


def _wait_for_admission(run: turnstream.Run) -> None:
    """Publish groups until one has to wait."""
    with (
        run.publisher("waits", admission_timeout_s=1.2) as publisher,
        contextlib.suppress(NotReadyError),
    ):
        for number in range(100):
            publisher.publish(group(f"many {number}")).result()
