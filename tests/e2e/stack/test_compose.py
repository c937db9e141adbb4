"""The commands of docker-compose.yml run as they stand: as processes, on a store with its users."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis

import turnstream
from testkit import wait_until
from testkit.requests.datums import as_sent, random_data
from testkit.requests.sdks import NEWEST, Sdk
from testkit.services.certificates import make_certificate
from testkit.services.compose import LocalStack, Started
from turnstream.errors import RunNotFoundError
from turnstream.store.client.connection import connect
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.models.byte_model import write_byte_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.campaign]

CLI = [sys.executable, "-m", "turnstream_server.cli"]
DEMO = ("generator", "trainer", "gateway", "batcher")
"""In the order in which the test starts them: each before the one it needs, the store last."""

HAS_ENDED = ("trainer", "generator")
"""Services that end with their run."""


def run_command(stack: LocalStack, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the operator."""
    environment = {"TURNSTREAM_REDIS_URL": stack.store_url("operator")}
    return subprocess.run(
        [*CLI, *words], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def num_committed(client: redis.Redis) -> int:
    """Return the committed steps of the run `demo`; 0 if there is no such run yet."""
    try:
        return read_frontier(client, "demo").committed
    except RunNotFoundError:
        return 0


def wait_until_ready(services: dict[str, Started]) -> None:
    for name, service in services.items():
        wait_until(service.is_ready, timeout_s=120, describe=f"ready: {name}")


def train_to_the_end(stack: LocalStack, services: dict[str, Started], *, steps: int) -> None:
    """Train some steps and close the run: the ledger is balanced, and no command was refused."""
    with connect(stack.store_url("operator")) as client:
        wait_until(
            lambda: num_committed(client) >= steps,
            timeout_s=150,
            describe=f"{steps} committed steps",
        )
    assert run_command(stack, "run", "close", "demo").returncode == 0
    for name in HAS_ENDED:
        assert services[name].process.wait(90) == 0, services[name].log.read_text()
    seen = json.loads(run_command(stack, "status", "demo", "--json").stdout)

    assert sum(seen["ledger"].values()) == seen["accepted"] > 0
    assert seen["ledger"]["open"] == seen["ledger"]["sealed"] == seen["ledger"]["planned"] == 0
    assert seen["newest_batch"]["mean_reward"] > 0
    with connect(stack.store_url("operator")) as client:
        assert client.acl_log() == []


@pytest.mark.timeout(400)
def test_stack_trains_although_every_service_starts_before_its_dependency(tmp_path: Path) -> None:
    with LocalStack(tmp_path) as stack:
        services = {name: stack.start(name) for name in DEMO}
        wait_until(
            lambda: all("waiting for" in each.log.read_text() for each in services.values()),
            timeout_s=90,
            describe="services that wait for the store",
        )
        stack.start_store()
        wait_until_ready(services)

        train_to_the_end(stack, services, steps=4)


@pytest.mark.timeout(400)
def test_hosted_models_train_and_sample_with_the_users_of_the_store(tmp_path: Path) -> None:
    data = as_sent(random_data(0, (6, 3, 11)))
    with LocalStack(tmp_path) as stack:
        write_byte_model(stack.volume("models") / "base" / "byte")
        stack.start_store()
        services = {name: stack.start(name) for name in ("batcher", "gateway", "engine", "sampler")}
        wait_until_ready(services)
        publish(stack, run="fleet")

        sdk = sdk_of(stack, services["gateway"])
        state = sdk.run("byte", "first_state", data=data, name="first")
        trained, sampled, *_ = sdk.run_all(
            "byte",
            [
                ("trained_on_a_run", {"run": "fleet", "steps": 3, "name": "of-fleet"}),
                ("sampled", {"state": state, "prompt": [*b"hello, "]}),
                ("saved_and_loaded", {"data": data, "name": "loaded"}),
                ("exported", {"data": data, "folder": str(tmp_path)}),
                ("listed", {}),
            ],
        )

        assert [each["metrics"]["step:max"] for each in trained["outputs"]] == [1, 2, 3]
        assert sampled["trained"]
        with connect(stack.store_url("operator")) as client:
            assert client.acl_log() == []


def publish(stack: LocalStack, *, run: str) -> None:
    """Create a run as its trainer, and publish enough for three steps as a generator."""
    with turnstream.connect(stack.store_url("trainer")) as service:
        service.create_run(run, batch_groups=2, max_staleness=9)
    with (
        turnstream.connect(stack.store_url("generator")) as service,
        service.run(run).publisher() as publisher,
    ):
        for number in range(6):
            with publisher.group(f"g{number}", num_samples=2) as group:
                for sample, trajectory in enumerate(group):
                    trajectory.append([10, 11], [40 + number, 50 + sample], logprobs=[-5.0, -5.5])
                    trajectory.seal(reward=float(sample))


def sdk_of(stack: LocalStack, gateway: Started) -> Sdk:
    """Return the tinker SDK as a client of the gateway, with the key of the services."""
    key = (stack.volume("keys") / "service.key").read_text().strip()
    address = f"127.0.0.1:{gateway.environment['TURNSTREAM_HTTP_PORT']}"
    return Sdk(NEWEST, address=address, api_key=key, folder=stack.folder)


@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server is installed")
def test_services_train_over_an_encrypted_connection_to_the_store(tmp_path: Path) -> None:
    with LocalStack(tmp_path, tls=make_certificate(tmp_path)) as stack:
        stack.start_store()
        services = {name: stack.start(name) for name in DEMO}
        wait_until_ready(services)

        train_to_the_end(stack, services, steps=2)
