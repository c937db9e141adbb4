"""The live generator as a process that reaches a gateway alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from testkit import wait_until
from testkit.forked import popen
from testkit.gateway_thread import GatewayThread
from turnstream.store.client.connection import connect_async
from turnstream.store.run.runs import close_run
from turnstream.types import TrajectoryState, VersionAnnounced
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.generators.guessing import VOCAB_SIZE
from turnstream_server.keys.store import create_key
from turnstream_server.ledger.queries.ledger import read_ledger
from turnstream_server.ledger.sessions.sessions import announce_version, start_session
from turnstream_server.models.policy import load_policy, save_policy
from turnstream_server.models.spec import SmallModelSpec

pytestmark = pytest.mark.redis


@pytest.fixture
async def run(
    server: EmbeddedServer, client: redis.Redis, new_run: Callable[..., str], tmp_path: Path
) -> str:
    """A run with weights."""
    name = new_run(client)
    spec = SmallModelSpec(vocab_size=VOCAB_SIZE, hidden_size=16, num_layers=1, seed=1)
    save_policy(load_policy(spec), tmp_path / "weights")
    uri = (tmp_path / "weights").as_uri()
    announced = VersionAnnounced(version=0, step=0, lineage="main", weights_uri=uri)
    async with connect_async(server.url) as store:
        session = await start_session(store, name, session="s", dp_world_size=1, token=None)
        await announce_version(store, name, announced, session_epoch=session.session_epoch)
    return name


@pytest.fixture
def generator(
    server: EmbeddedServer, client: redis.Redis, run: str, tmp_path: Path
) -> Iterator[Callable[[Any], subprocess.Popen[str]]]:
    """`generator("produce")` starts a process whose key has this role."""
    started: list[subprocess.Popen[str]] = []
    with GatewayThread(server.url, requires_key=True) as gateway:

        def start(role: Any) -> subprocess.Popen[str]:
            key = create_key(client, f"{role} of {run}", roles=[role])
            (tmp_path / "key").write_text(key)
            words = ["serve", "generator", "--run", run, "--round", "2", "--threads", "1"]
            process = popen(
                [sys.executable, "-m", "turnstream_server.cli", *words],
                env={
                    **os.environ,
                    "TURNSTREAM_REDIS_URL": gateway.base_url,
                    "TURNSTREAM_REDIS_PASSWORD_FILE": str(tmp_path / "no password of a store"),
                    "TURNSTREAM_KEY_FILE": str(tmp_path / "key"),
                },
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(process)
            return process

        yield start
        for process in started:
            process.kill()
            process.communicate()


def test_generator_plays_over_http_until_the_run_is_closed(
    client: redis.Redis, run: str, generator: Callable[..., subprocess.Popen[str]]
) -> None:
    process = generator("produce")

    def has_played() -> bool:
        assert process.poll() is None, process.communicate()
        return read_ledger(client, run).by_state[TrajectoryState.SEALED] >= 16

    wait_until(has_played, 120, describe="two groups")
    close_run(client, run)
    _, log = process.communicate(timeout=60)

    assert process.returncode == 0, log
    ledger = read_ledger(client, run)
    assert ledger.by_state[TrajectoryState.SEALED] == ledger.accepted


def test_generator_over_http_ends_without_the_role_produce(
    client: redis.Redis, run: str, generator: Callable[..., subprocess.Popen[str]]
) -> None:
    process = generator("read")

    _, log = process.communicate(timeout=120)

    assert process.returncode not in (0, None)
    assert "has the roles read, needed is produce" in log
    assert read_ledger(client, run).accepted == 0
