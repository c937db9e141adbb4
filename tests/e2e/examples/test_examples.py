"""The short examples, as programs on a real stack."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from testkit import wait_until
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import list_runs
from turnstream.types import TrajectoryState
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.launch.stack import Stack
from turnstream_server.ledger.queries.ledger import read_ledger

EXAMPLES = Path(__file__).parents[3] / "examples"


class Services(NamedTuple):
    """Store, batcher and gateway.

    Attributes:
        url: address of the store.
        http: address of the gateway.
    """

    url: str
    http: str

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a program."""
        values = {**os.environ, "TURNSTREAM_REDIS_URL": self.url, **environment}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=values, stdout=pipe, stderr=pipe, text=True)

    def has_run(self, name: str) -> bool:
        """Return whether a run exists."""
        with connect(self.url) as client:
            return name in [each.name for each in list_runs(client)]

    def num_sealed(self, run: str) -> int:
        """Return the number of trajectories of a run that were sealed."""
        with connect(self.url) as client:
            by_state = read_ledger(client, run).by_state
        return sum(by_state.values()) - by_state[TrajectoryState.ABANDONED]


def output_of(process: subprocess.Popen[str]) -> str:
    """Return the output of a program that must succeed."""
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors + output
    return output


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("services")
    with EmbeddedServer() as store, Stack(folder, store_url=store.url) as stack:
        stack.start_batcher()
        gateway = stack.start_listening("gateway", "gateway", listen="127.0.0.1:0")
        yield Services(store.url, f"http://{gateway.address}")


@pytest.mark.parametrize("over_http", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_generator_and_trainer_learn_the_rewarded_token(
    services: Services, over_http: bool
) -> None:
    arguments = [services.http] if over_http else []

    generator = services.start(sys.executable, str(EXAMPLES / "generator.py"), *arguments)
    wait_until(lambda: services.has_run("demo"))
    trainer = services.start(sys.executable, str(EXAMPLES / "trainer.py"))
    output_of(generator)
    output = output_of(trainer)

    assert services.num_sealed("demo") == 80
    assert float(output.rpartition(" ")[2]) > 0.15  # untrained it is 0.1


def test_shell_generator_sends_every_trajectory_once(services: Services) -> None:
    program = str(EXAMPLES / "generator.sh")
    for _ in range(2):
        output = output_of(services.start("sh", program, TURNSTREAM_HTTP_URL=services.http))
        assert output.count('"status":201') == 40

    assert services.num_sealed("shell") == 40


def test_script_prints_results_ledger_and_reasons(services: Services) -> None:
    program = str(EXAMPLES / "http_api.py")
    output = output_of(services.start(sys.executable, program, services.http))

    assert output.splitlines()[:4] == [
        "0 0 201 open",
        "0 1 201 sealed",
        "1 0 201 open",
        "1 1 201 sealed",
    ]
    assert services.num_sealed("script") == 2
