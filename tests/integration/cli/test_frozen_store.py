"""A store that is stopped keeps its connections: commands that look into it end all the same."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from testkit import config
from turnstream.errors import StoreUnavailableError, WaitKind
from turnstream.store.client.addresses import address_of
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream_server import cli
from turnstream_server.console import store_client
from turnstream_server.embedded import EmbeddedServer

LONGEST_S = 20.0
"""Far above the deadline, on a machine that is busy, and far below the sockets' own timeouts."""


@pytest.fixture
def frozen_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a store with a run; its server stands still."""
    monkeypatch.setattr(store_client, "SILENT_S", 0.2)
    with EmbeddedServer() as server:
        with connect(server.url) as client:
            create_run(client, "maze", config())
        os.kill(server.pid, signal.SIGSTOP)
        yield server.url
        os.kill(server.pid, signal.SIGCONT)


def test_why_gives_the_silence_of_the_store_as_the_reason(frozen_url: str) -> None:
    began_s = time.monotonic()

    shown = CliRunner().invoke(cli.app, ["why", "maze", "--redis", frozen_url])
    told = CliRunner().invoke(cli.app, ["why", "maze", "--redis", frozen_url, "--json"])

    assert time.monotonic() - began_s < LONGEST_S
    assert (shown.exit_code, told.exit_code) == (0, 0)
    address = address_of(frozen_url)
    assert re.match(rf"store_away: the store at {re.escape(address)} was asked \d", shown.output)
    (reason,) = json.loads(told.output)["reasons"]
    assert (reason["kind"], reason["facts"]["address"]) == (WaitKind.STORE_AWAY, address)
    assert 0.2 <= reason["facts"]["since_s"] < LONGEST_S
    for words in (["ledger", "maze"], ["ledger", "maze", "a/0/0"], ["run", "list"], ["status"]):
        other = CliRunner().invoke(cli.app, [*words, "--redis", frozen_url])
        assert other.exit_code == 1
        assert isinstance(other.exception, StoreUnavailableError)
        assert [each.kind for each in other.exception.reasons] == [WaitKind.STORE_AWAY]
        assert f"the store at {address} was asked" in str(other.exception)
    assert time.monotonic() - began_s < 4 * LONGEST_S
