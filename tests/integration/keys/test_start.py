"""Starts of batcher and gateway: addresses that need a key, and the key of the first start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
import redis
from typer.testing import CliRunner

import turnstream
from testkit import wait_until
from testkit.services.observed_processes import Processes
from turnstream.errors import AccessDeniedError, InvalidConfigError, UnknownKeyError
from turnstream.store.client.connection import connect
from turnstream_server import cli, waits
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.keys.store import KEYS, create_key, list_keys, requires_key, revoke_key
from turnstream_server.settings import Settings

pytestmark = pytest.mark.redis

PASSWORD = "hush-of-the-store"


class PasswordServer(EmbeddedServer):
    """A store with a password."""

    @property
    def url(self) -> str:
        """Return the address, with the password."""
        return super().url.replace("://", f"://:{PASSWORD}@")

    def _command(self) -> list[str]:
        return [*super()._command(), "--requirepass", PASSWORD]


@pytest.fixture
def own_client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    """A client of a store without keys."""
    with connect(server.url) as client:
        client.delete(KEYS)
        yield client
        client.delete(KEYS)


_NO: Final[dict[str, bool]] = {"has_key": False, "has_file": False, "is_insecure": False}
ADDRESSES: Final[list[tuple[str, dict[str, bool], bool | None]]] = [
    ("127.0.0.1", {}, False),
    ("[::1]", {"has_key": True}, False),
    ("localhost", {"has_file": True}, True),
    ("0.0.0.0", {"has_key": True}, True),
    ("0.0.0.0", {"has_file": True}, True),
    ("10.0.0.7", {"is_insecure": True}, False),
    ("batcher.internal", {"has_key": True, "has_file": True, "is_insecure": True}, False),
    ("batcher.internal", {}, None),
    ("[::]", {}, None),
]
"""Whether requests to an address need a key; None where the start is refused."""


def test_addresses_that_other_machines_reach_need_keys(
    own_client: redis.Redis, tmp_path: Path
) -> None:
    for host, given, expected in ADDRESSES:
        has_key, has_file, is_insecure = {**_NO, **given}.values()
        own_client.delete(KEYS)
        if has_key:
            create_key(own_client, "ci", roles=["read"])
        options: Any = {
            "host": host,
            "key_file": tmp_path / "key" if has_file else None,
            "is_insecure": is_insecure,
        }
        if expected is None:
            with pytest.raises(InvalidConfigError):
                requires_key(own_client, **options)
            continue
        assert requires_key(own_client, **options) is expected
        names = [key.name for key in list_keys(own_client)]
        assert names == ["ci"] * has_key + ["service"] * has_file


@pytest.mark.parametrize("service", ["batcher", "gateway"])
def test_open_address_without_keys_is_refused_in_one_line(
    server: EmbeddedServer, own_client: redis.Redis, service: str
) -> None:
    command = [sys.executable, "-m", "turnstream_server", "serve", service]

    done = subprocess.run(
        [*command, "--redis", server.url, "--listen", "0.0.0.0:0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: --listen: other machines reach '0.0.0.0'")
    for way in ("`turnstream key create`", "TURNSTREAM_KEY_FILE", "--insecure"):
        assert way in done.stderr


def test_commands_create_list_and_revoke_keys(
    server: EmbeddedServer, own_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", server.url)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str) -> str:
        result = CliRunner().invoke(cli.app, ["key", *words])
        assert result.exit_code == 0, result.exception
        return result.output.strip()

    secret = run("create", "ci", "--role", "produce", "--role", "read", "--run", "demo")
    limits = ("--requests-per-s", "5", "--bytes-per-s", "1e6", "--max-body-bytes", "1000")
    other = run("create", "night", "--role", "train", "--expires", "30d", *limits, "--json")
    listed, table = run("list", "--json"), run("list")
    run("revoke", "ci")

    (left,) = list_keys(own_client)
    assert left.name == "night"
    assert left.expires_ms == left.created_ms + 30 * 86_400_000
    assert left.limits == (5.0, 1e6, 1_000)
    assert secret.startswith("tml-")
    assert '"key": "tml-' in other
    assert "tml-" not in listed + table
    assert '"runs": [\n      "demo"\n    ]' in listed
    assert "produce read" in table


def test_wrong_options_of_a_key_are_named(server: EmbeddedServer, own_client: redis.Redis) -> None:
    for words, problem in {
        ("--role", "root"): "--role: 'root' is not one of produce, train, read, admin",
        ("--role", "read", "--expires", "soon"): "--expires: 'soon' is not a time such as",
        ("--role", "read", "--requests-per-s", "0"): "requests_per_s is 0.0",
    }.items():
        result = CliRunner().invoke(cli.app, ["key", "create", "ci", "--redis", server.url, *words])
        assert result.exit_code == 1
        assert str(result.exception).startswith(problem)
    assert list_keys(own_client) == []


def test_service_waits_for_the_file_of_its_key(tmp_path: Path) -> None:
    settings = Settings(key_file=tmp_path / "key", start_wait_s=0)

    with pytest.raises(turnstream.errors.UnavailableError, match="does not exist yet"):
        waits.wait_for_own_key(settings)
    waits.wait_for_own_key(settings.model_copy(update={"key_file": None}))


@pytest.mark.slow
@pytest.mark.grpc
def test_first_start_makes_one_key_and_no_secret_is_logged(
    tmp_path: Path, new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file = tmp_path / "service.key"
    variables = {"TURNSTREAM_KEY_FILE": str(key_file), "TURNSTREAM_LOG_LEVEL": "DEBUG"}
    with PasswordServer() as store, connect(store.url) as client:
        run = new_run(client)
        with Processes(store.url, tmp_path, **variables) as them:
            batcher, gateway = them.start("batcher"), them.start("gateway")
            address, url = batcher.address, f"http://{gateway.address}/api/v1/client/config"
            key = key_file.read_text().strip()
            (stored,) = list_keys(client)

            statuses = [
                httpx2.post(url, headers=headers).status_code
                for headers in ({"X-API-Key": key}, {"X-API-Key": "tml-wrong-hush"}, {})
            ]
            for refused in ("tml-wrong-hush", ""):
                with pytest.raises(UnknownKeyError):
                    train(store.url, run, batcher=address, api_key=refused)
            monkeypatch.setenv("TURNSTREAM_KEY_FILE", str(key_file))
            train(store.url, run)  # at the address in the store
            store.restart()
            train(store.url, run, batcher=address)
            revoke_key(client, "service")
            wait_until(lambda: is_refused(store.url, run, address), describe="the refusal")
            for process in (batcher, gateway):
                process.popen.terminate()
                assert process.popen.wait(30) == 0
        environment = {**variables, "TURNSTREAM_REDIS_URL": store.url}
        config = CliRunner().invoke(cli.app, ["config"], env=environment).output

    assert stored.name == "service"
    assert statuses == [200, 401, 401]
    logs = batcher.log_path.read_text() + gateway.log_path.read_text()
    assert "DEBUG" in logs
    assert "TURNSTREAM_KEY_FILE=" in config
    for secret in (key, key.removeprefix("tml-"), PASSWORD, "tml-wrong-hush"):
        assert secret not in logs
        assert secret not in config


def train(url: str, run: str, **options: Any) -> None:
    """Begin a trainer session."""
    with turnstream.connect(url) as service:
        service.run(run).batches(timeout_s=60, **options).close()


def is_refused(url: str, run: str, batcher: str) -> bool:
    try:
        train(url, run, batcher=batcher)
    except AccessDeniedError:
        return True
    return False
