from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

import turnstream
from testkit import wait_until
from turnstream.errors import InvalidConfigError
from turnstream.store.client.connection import connect
from turnstream_server import cli

if TYPE_CHECKING:
    from tests.e2e.conftest import Job

pytestmark = [pytest.mark.e2e]


FREE = ("--port", "0", "--store-port", "0", "--http-port", "0")


def start_up(job: Job, *options: str) -> dict[str, str]:
    """Start store, batcher and gateway on free ports; return the printed addresses by name."""
    process = job.start("up", *(options or FREE))
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(6)]
    return {line.split()[0]: line.split()[1] for line in lines}


def test_up_uses_the_default_ports_and_leaves_nothing_when_it_is_killed(
    job: Job, default_ports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TURNSTREAM_REDIS_URL", raising=False)
    printed = start_up(job, "--batchers", "1")

    assert printed["batcher"] == "127.0.0.1:7600"
    assert printed["export"] == "TURNSTREAM_REDIS_URL=" + printed["store"]
    assert printed["gateway"] == "http://127.0.0.1:7601"
    assert turnstream.connect().runs() == []
    assert turnstream.connect(printed["gateway"]).runs() == []
    second = CliRunner().invoke(cli.app, ["up", *FREE, "--data-dir", str(job.folder)])
    assert f"another server uses the data folder {job.folder}" in str(second.exception)
    before = job.processes()

    job.process.kill()

    for service in ("cli up", "cli serve batcher", "cli serve gateway", "valkey"):
        assert [line for line in before if service in line], before
    wait_until(lambda: job.processes() == [], timeout_s=60, describe="the end of every process")


@pytest.mark.parametrize("option", ["--port", "--store-port", "--http-port"])
def test_taken_port_is_refused_with_port_and_option(tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["up", *FREE, "--data-dir", str(tmp_path), option, str(port)]

        error = CliRunner().invoke(cli.app, words).exception

    assert isinstance(error, InvalidConfigError)
    assert str(error).startswith(f"{option}: port {port} of 127.0.0.1 is taken")


def test_signal_stops_everything_with_one_line_and_keeps_the_data(job: Job) -> None:
    """Takes more than 5 s: `turnstream up` starts twice."""
    for number, name in enumerate((signal.SIGINT, signal.SIGTERM), start=1):
        with connect(start_up(job)["store"]) as client:
            assert client.incr("starts") == number

        job.process.send_signal(name)
        output, _ = job.process.communicate(timeout=60)

        assert (job.process.returncode, output) == (130, "interrupted\n"), name
        assert job.processes() == []
        assert job.files_outside() == []


def test_a_batcher_that_dies_ends_the_job_with_its_last_words(job: Job) -> None:
    start_up(job)
    [batcher] = [line for line in job.processes() if "cli serve batcher" in line]

    os.kill(int(batcher.split()[0]), signal.SIGKILL)
    output, _ = job.process.communicate(timeout=60)

    assert job.process.returncode == 1
    assert "error: batcher-0 ended with signal 9; its log is " in output
    assert "batcher listens at" in output
    assert "Traceback" not in output
    assert job.processes() == []
