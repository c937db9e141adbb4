"""TLS of batcher, gateway and metrics, with certificates of an authority of the test."""

from __future__ import annotations

import dataclasses
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis

import turnstream
from testkit.services.batchers import BatcherThread
from testkit.services.compose import REPOSITORY
from testkit.services.inference_servers import serving
from testkit.services.observed_processes import Processes
from turnstream.errors import (
    AccessDeniedError,
    BatcherUnavailableError,
    InvalidConfigError,
    UnknownKeyError,
)
from turnstream.store.run.batchers import list_batchers
from turnstream.weights import fetch_weights, write_checksums
from turnstream.worker import BatchStream
from turnstream_server import http_server
from turnstream_server.bootstrap import start_trainer
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.keys.store import create_key
from turnstream_server.listener import serve_metrics
from turnstream_server.settings import Settings
from turnstream_server.telemetry.readiness import Readiness
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.publishing import WeightsAccess, serve_weights, weights_app

pytestmark = pytest.mark.redis


def test_published_weights_need_a_key_of_the_run_and_have_tls(
    server: EmbeddedServer,
    client: redis.Redis,
    run: str,
    certificates: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    version = tmp_path / "weights" / "v1"
    version.mkdir(parents=True)
    (version / "config.json").write_bytes(b"{}")
    write_checksums(version)
    reads = create_key(client, f"reads {run}", roles=["read"], runs=[run])
    denied = [
        create_key(client, f"reads another than {run}", roles=["read"], runs=["another"]),
        create_key(client, f"produces {run}", roles=["produce"], runs=[run]),
    ]
    monkeypatch.setenv("TURNSTREAM_TLS_CA", str(certificates.ca))
    access = WeightsAccess(server.url, run, requires_key=True, tls=certificates.tls)

    with serve_weights(version.parent, listen="127.0.0.1:0", access=access) as weights:
        fetch = partial(fetch_weights, f"{weights.url}/v1", cache=tmp_path / "cache", timeout_s=30)
        for key in ("", "tml-unknown"):
            with pytest.raises(UnknownKeyError, match="401"):
                fetch(api_key=key)
        for key in denied:
            with pytest.raises(AccessDeniedError, match="403"):
                fetch(api_key=key)
        bearer = {"X-API-Key": "", "Authorization": f"Bearer {reads}"}
        trusted = ssl.create_default_context(cafile=str(certificates.ca))
        config = httpx2.get(f"{weights.url}/v1/config.json", headers=bearer, verify=trusted)
        assert config.status_code == 200
        monkeypatch.setenv("TURNSTREAM_API_KEY", reads)
        assert (fetch() / "config.json").read_bytes() == b"{}"
        assert weights.url.startswith("https://127.0.0.1:")


def test_key_is_sent_only_to_a_weights_server_that_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "config.json").write_bytes(b"{}")
    write_checksums(tmp_path / "v1")
    app, sent = weights_app(tmp_path), list[bytes]()

    async def recorded(scope: Any, receive: Any, send: Any) -> None:
        sent.extend(name for name, _ in scope.get("headers", ()))
        await app(scope, receive, send)

    with serving(recorded) as url:
        fetch_weights(f"{url}/v1", cache=tmp_path / "cache", api_key="tml-secret")

    assert b"host" in sent
    assert b"x-api-key" not in sent


def test_trainer_serves_weights_to_other_machines_only_with_a_key(tmp_path: Path) -> None:
    config = TrainerConfig(run="r", folder=tmp_path, weights_listen="0.0.0.0:0")
    with EmbeddedServer() as server:
        config = dataclasses.replace(config, batcher_target="127.0.0.1:1", redis_url=server.url)
        with pytest.raises(InvalidConfigError, match=r"other machines reach '0.0.0.0'"):
            start_trainer(Settings(), config)
    with pytest.raises(InvalidConfigError, match="other machines reach"):
        serve_weights(tmp_path, listen=config.weights_listen)


@pytest.fixture
def run(client: redis.Redis, new_run: Callable[..., str]) -> str:
    return new_run(client)


@pytest.mark.grpc
def test_batcher_is_found_and_called_with_tls(
    server: EmbeddedServer,
    client: redis.Redis,
    run: str,
    certificates: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = create_key(client, f"tls of {run}", roles=["train"])
    monkeypatch.setenv("TURNSTREAM_TLS_CA", str(certificates.ca))

    with (
        BatcherThread(server.url, tls=certificates.tls, requires_key=True) as batcher,
        turnstream.connect(server.url) as service,
    ):
        assert list_batchers(client)[0] == batcher.target
        assert batcher.target.startswith("grpcs://127.0.0.1:")
        service.run(run).batches(api_key=key, timeout_s=30).close()
        named = batcher.target.replace("127.0.0.1", "localhost")
        with pytest.raises(UnknownKeyError):
            BatchStream(named, run, timeout_s=30)
        for target, ca in (
            (batcher.target.removeprefix("grpcs://"), str(certificates.ca)),
            (batcher.target, str(certificates.tls.key)),
            (batcher.target, ""),  # its authority is unknown
        ):
            monkeypatch.setenv("TURNSTREAM_TLS_CA", ca)
            with pytest.raises(BatcherUnavailableError):
                BatchStream(target, run, api_key=key, timeout_s=2)
        monkeypatch.setenv("TURNSTREAM_TLS_CA", "/no/such/file")
        with pytest.raises(InvalidConfigError, match=r"TURNSTREAM_TLS_CA: /no/such/file cannot"):
            BatchStream(batcher.target, run, timeout_s=2)


@pytest.mark.grpc
def test_peer_without_a_handshake_is_disconnected(
    certificates: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_HANDSHAKE_S", 0.2)
    with (
        serve_metrics("127.0.0.1", 0, readiness=Readiness("batcher"), tls=certificates.tls) as it,
        socket.create_connection(("127.0.0.1", it.port), timeout=10) as peer,
    ):
        assert peer.recv(1) == b""


def test_metrics_are_served_with_the_certificate_of_the_service(
    server: EmbeddedServer, certificates: Any, tmp_path: Path
) -> None:
    cert, key = map(str, certificates.tls)
    trust = ssl.create_default_context(cafile=certificates.ca)
    with Processes(server.url, tmp_path, TURNSTREAM_TLS_CERT=cert, TURNSTREAM_TLS_KEY=key) as them:
        batcher = them.start("batcher")
        assert batcher.address.startswith("grpcs://")
        place = f"127.0.0.1:{batcher.port}"

        metrics = httpx2.get(f"https://{place}/metrics", verify=trust)

        assert "turnstream_" in metrics.text
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"http://{place}/metrics")
        ready = subprocess.run(
            [sys.executable, "-IS", REPOSITORY / "deploy/ready.py"],
            env={"TURNSTREAM_METRICS_LISTEN": place, "TURNSTREAM_TLS_CERT": cert},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert '"registration"' in ready.stdout, ready.stderr
