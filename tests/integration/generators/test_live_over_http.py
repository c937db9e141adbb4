"""The live generator as a process that reaches a gateway alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


def test_generator_over_http_plays_until_the_run_is_closed(
    server: EmbeddedServer, client: redis.Redis, run: str, tmp_path: Path
) -> None:
    with GatewayThread(server.url, requires_key=True) as gateway:
        (tmp_path / "key").write_text(create_key(client, f"of {run}", roles=["produce"]))
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

        def has_played() -> bool:
            assert process.poll() is None, process.communicate()
            return read_ledger(client, run).by_state[TrajectoryState.SEALED] >= 16

        try:
            wait_until(has_played, 120, describe="two groups")
            close_run(client, run)
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()

    assert process.returncode == 0, log
    ledger = read_ledger(client, run)
    assert ledger.by_state[TrajectoryState.SEALED] == ledger.accepted
