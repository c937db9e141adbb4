from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from turnstream.errors import RunNotFoundError
from turnstream.store.connection import connect
from turnstream.store.runs import close_run, create_run
from turnstream.testing import config
from turnstream_server import cli
from turnstream_server.embedded import EmbeddedServer


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a store, also in the environment."""
    monkeypatch.setenv("COLUMNS", "100")
    with EmbeddedServer() as server:
        monkeypatch.setenv("TURNSTREAM_REDIS_URL", server.url)
        yield server.url


def test_runs_lists_every_run_of_the_store(url: str) -> None:
    with connect(url) as client:
        create_run(client, "maze", config())
        create_run(client, "guess it/2", config())
        close_run(client, "maze")

    shown = CliRunner().invoke(cli.app, ["runs"])

    lines = [line for line in shown.output.splitlines() if "maze" in line or "guess" in line]
    assert [("yes" in line, "no" in line) for line in lines] == [(False, True), (True, False)]


def test_runs_says_that_there_is_none(url: str) -> None:
    shown = CliRunner().invoke(cli.app, ["runs", "--redis", url])

    assert shown.output == "no runs\n"


def test_show_prints_frontier_ledger_and_configuration(url: str) -> None:
    with connect(url) as client:
        create_run(client, "maze", config(batch_groups=6, mini_batch_groups=3))

    shown = CliRunner().invoke(cli.app, ["show", "maze"])

    assert shown.exit_code == 0
    for words in ("0 planned", "0 stepped, 0 committed", "accepted", "mini_batch_groups", "none"):
        assert words in shown.output


def test_show_of_an_unknown_run_is_a_clear_error(url: str) -> None:
    shown = CliRunner().invoke(cli.app, ["show", "nobody"])

    assert isinstance(shown.exception, RunNotFoundError)
    assert "nobody" in str(shown.exception)
