"""A gateway on a real store and a real socket, for the SDK over HTTP, with the store beside it."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis

import turnstream
from testkit import gateways, ids, servers, wait_until
from testkit.gateway_thread import GatewayThread
from testkit.generator_calls import SETTINGS, operate, write_everything
from testkit.scripts import script
from testkit.store_commands import SESSION_RUN, name_of
from turnstream.store.client import keys
from turnstream.store.run.batchers import list_batchers
from turnstream.store.run.configs import read_revisions
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.rest.commands import store as store_route
from turnstream_server.gateway.rest.commands.packing import read_commands
from turnstream_server.tls import Tls

_numbers = itertools.count(1)
_HEARTBEAT = script("heartbeat").sha.encode()


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


class Certificates(NamedTuple):
    """Files of a service, and the certificate that its clients trust."""

    tls: Tls
    ca: Path


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A certificate for this machine, signed by itself."""
    folder = tmp_path_factory.mktemp("certificates")
    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    names = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", "server.key", "-out", "server.pem", "-days", "2"]
    subprocess.run(["openssl", *new, *names, *files], cwd=folder, check=True, capture_output=True)
    return Certificates(Tls(folder / "server.pem", folder / "server.key"), folder / "server.pem")


class Connected(NamedTuple):
    """The store by one way.

    Attributes:
        url: the address.
        service: the store at this address.
    """

    url: str
    service: turnstream.Service


@pytest.fixture(params=["redis", "http"])
def connected(request: Any, url_of: Callable[[str], str]) -> Iterator[Connected]:
    """The store, over Redis and over HTTP."""
    url = url_of(request.param)
    with turnstream.connect(url) as service:
        yield Connected(url, service)


@pytest.fixture
def new_name() -> str:
    """The name of a run that does not exist."""
    return f"over http {next(_numbers)}"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[list[list[bytes]]]:
    """The commands of every body that the gateway has read."""
    bodies: list[list[list[bytes]]] = []
    plan = store_route.plan_commands

    def recording(body: bytes, key: Any) -> Any:
        bodies.append(read_commands(body))
        return plan(body, key)

    monkeypatch.setattr(store_route, "plan_commands", recording)
    return bodies


@pytest.fixture(scope="module")
def sent(server: Any) -> dict[str, list[list[bytes]]]:
    """The commands of a session with every call of the SDK, by their names."""
    bodies: list[bytes] = []
    plan = store_route.plan_commands

    def recording(body: bytes, key: Any) -> Any:
        bodies.append(body)
        return plan(body, key)

    with pytest.MonkeyPatch.context() as patch, GatewayThread(server.url) as gateway:
        patch.setattr(store_route, "plan_commands", recording)
        with turnstream.connect(gateway.base_url) as service:
            run = service.create_run(SESSION_RUN, **SETTINGS)
            write_everything(run)
            operate(run)
            assert run.reopen()
            service.runs()
            client: redis.Redis = service._client
            list_batchers(client)
            read_revisions(client, SESSION_RUN)
            client.xread({keys.run_keys(SESSION_RUN).versions: "0-0"}, count=1, block=1)
            client.xrevrange(keys.run_keys(SESSION_RUN).versions, count=1)
            client.hget(keys.run_keys(SESSION_RUN).config, "1")
            with run.publisher() as publisher:
                open_ = publisher.trajectory("beats", 0, num_samples=1)
                open_.append(ids("a"), ids("B")).result()
                wait_until(
                    lambda: any(_HEARTBEAT in body for body in bodies), describe="a heartbeat"
                )
                open_.abandon("over")
    found: dict[str, list[list[bytes]]] = {}
    for body in bodies:
        for words in read_commands(body):
            found.setdefault(name_of(words), []).append(words)
    return {name: calls for name, calls in found.items() if name not in ("MULTI", "EXEC")}
