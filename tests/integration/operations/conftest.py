"""Command logs in a store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testkit.runs.command_logs import CommandLogs
from testkit.services import servers
from turnstream_server.embedded import EmbeddedServer

server, own_server = servers.server_of_each_kind, servers.own_server_of_each_kind


@pytest.fixture
def logs(server: EmbeddedServer) -> Iterator[CommandLogs]:
    """Logs in the shared store."""
    with CommandLogs(server.url) as logs:
        yield logs


@pytest.fixture
def own_logs(own_server: EmbeddedServer) -> Iterator[CommandLogs]:
    """Logs in a store that a test may kill and fill."""
    with CommandLogs(own_server.url) as logs:
        yield logs
