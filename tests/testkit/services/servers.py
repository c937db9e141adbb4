"""Stores of the tests, and fixtures that a family's conftest.py assigns to the names of its own.

Tests run on the embedded server. Families whose subject is the store run on redis-server too, most
of them in `make campaign` alone::

    server, own_server = servers.server_of_each_kind, servers.own_server_of_each_kind
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from testkit.waiting import wait_until
from turnstream.store.client.connection import connect
from turnstream_server.embedded import EmbeddedServer, EmbeddedServerError, find_binary

SERVER_KINDS = ["valkey", "redis-server"]


def runs_in_the_campaign(item: pytest.Function) -> bool:
    """Return whether a test is on redis-server, and none of those that run each script there."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    is_second = any(params.get(name) == "redis-server" for name in ("server", "own_server"))
    return is_second and item.get_closest_marker("both_servers") is None


class MortalServer(EmbeddedServer):
    """A store that may be killed: its file has every acknowledged write.

    While a slow disk syncs, a server keeps its next write back for up to two seconds.
    """

    def kill(self) -> None:
        """SIGKILL it, as soon as its file has all; at once where it does not answer."""
        if self.is_running:
            with (
                contextlib.suppress(redis.RedisError),
                connect(self.url, num_retries=0, silent_s=2.0) as client,
            ):
                wait_until(lambda: is_written(client), describe="the write to the file")
        super().kill()


class UnixServer(EmbeddedServer):
    """The embedded store, reached by a unix socket in its data folder."""

    @property
    def url(self) -> str:
        """Return the address of the socket."""
        return f"unix://{self.data_dir}/valkey.sock?db=0"

    def _command(self) -> list[str]:
        return [*super()._command(), "--unixsocket", "valkey.sock"]


def is_written(client: redis.Redis) -> bool:
    """Return whether a busy disk keeps nothing back that was acknowledged."""
    persistence: Any = client.info("persistence")
    return not persistence["aof_buffer_length"]


def binary_of(kind: str) -> Path:
    """Return the program of a kind of server; skip the test where there is none.

    On CI the embedded server must be there. A redis-server may be missing on CI too: `.ci/run`
    installs it where it can, and counts the skipped tests in its last line.
    """
    if kind == "redis-server":
        found = shutil.which("redis-server")
        if found is None:
            pytest.skip("no redis-server is installed")
        return Path(found)
    try:
        return find_binary()
    except EmbeddedServerError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def shared_server() -> Iterator[EmbeddedServer]:
    """The embedded store of a test module: a batcher on it leads no runs of other modules."""
    with EmbeddedServer(binary=binary_of("valkey")) as server:
        yield server


@pytest.fixture(scope="module", params=SERVER_KINDS)
def server_of_each_kind(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """`shared_server`, and a real redis-server where there is one."""
    with EmbeddedServer(binary=binary_of(request.param)) as server:
        yield server


@pytest.fixture
def own_embedded_server() -> Iterator[EmbeddedServer]:
    """An embedded store that a test may kill, fill and restart."""
    with MortalServer(binary=binary_of("valkey")) as server:
        yield server


@pytest.fixture(params=SERVER_KINDS)
def own_server_of_each_kind(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """`own_embedded_server`, and a real redis-server where there is one."""
    with MortalServer(binary=binary_of(request.param)) as server:
        yield server
