from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import turnstream
from testkit import wait_until
from turnstream.store.client.connection import connect

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


def test_up_uses_the_default_ports_and_prints_the_line_to_export(
    job: Job, default_ports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TURNSTREAM_REDIS_URL", raising=False)
    printed = start_up(job, "--batchers", "1")

    assert printed["batcher"] == "127.0.0.1:7600"
    assert printed["export"] == "TURNSTREAM_REDIS_URL=" + printed["store"]
    assert printed["gateway"] == "http://127.0.0.1:7601"
    assert turnstream.connect().runs() == []
    assert turnstream.connect(printed["gateway"]).runs() == []


@pytest.mark.parametrize("option", ["--port", "--store-port", "--http-port"])
def test_taken_port_ends_in_one_line_with_port_and_option(job: Job, option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        status, output = job.run("up", *FREE, option, str(port), timeout_s=60)

    assert status == 1
    assert f"{option}: port {port} of 127.0.0.1 is taken" in output
    assert output.count("\n") == 1


def test_second_up_on_the_same_data_is_refused_with_the_folder(job: Job) -> None:
    start_up(job)
    command = [sys.executable, "-P", "-m", "turnstream_server.cli", "up", *FREE]

    second = subprocess.run(
        [*command, "--data-dir", str(job.folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert second.returncode == 1
    assert f"another server uses the data folder {job.folder}" in second.stderr


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_everything_with_one_line(job: Job, name: signal.Signals) -> None:
    start_up(job)
    process = job.process

    process.send_signal(name)
    output, _ = process.communicate(timeout=60)

    assert (process.returncode, output) == (130, "interrupted\n")
    assert job.processes() == []
    assert job.files_outside() == []


def test_nothing_survives_the_death_of_the_supervisor(job: Job) -> None:
    start_up(job)
    before = job.processes()

    job.process.kill()

    for service in ("cli up", "cli serve batcher", "cli serve gateway", "valkey"):
        assert [line for line in before if service in line], before
    wait_until(lambda: job.processes() == [], timeout_s=60, describe="the end of every process")


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


def test_data_is_kept_from_one_up_to_the_next(job: Job) -> None:
    """Takes more than 5 s: `turnstream up` starts twice."""
    with connect(start_up(job)["store"]) as client:
        client.set("kept", "1")
    job.process.send_signal(signal.SIGINT)
    job.process.communicate(timeout=60)

    with connect(start_up(job)["store"]) as client:
        assert client.get("kept") == b"1"
