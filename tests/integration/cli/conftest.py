"""A store that the command line finds in its environment, and a batcher at work on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from testkit.services.batchers import BatcherThread
from turnstream.batching.config import BatchingConfig
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream.types import Group, RecoveryToken
from turnstream.worker import BatchStream
from turnstream_server import cli
from turnstream_server.embedded import EmbeddedServer


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a store, also in the environment."""
    monkeypatch.setenv("COLUMNS", "100")
    with EmbeddedServer() as server:
        monkeypatch.setenv("TURNSTREAM_REDIS_URL", server.url)
        yield server.url


class Place:
    """A store with a batcher, to which commands are typed."""

    def __init__(self, url: str, target: str) -> None:
        self.url = url
        self.target = target

    def create_run(self, run: str, **settings: Any) -> str:
        """A run of one group a step; gives its name."""
        config = BatchingConfig(**{"batch_groups": 1, "mini_batch_groups": 1, **settings})
        with connect(self.url) as client:
            create_run(client, run, config)
        return run

    def publish(self, run: str, *groups: Group) -> None:
        """Send whole groups, in order."""
        with Publisher(self.url, run, writer="gen-1") as publisher:
            for group in groups:
                publisher.publish(group).result(10)

    def train(
        self, run: str, *, steps: int = 1, after: RecoveryToken | None = None
    ) -> list[RecoveryToken]:
        """Step and commit the next batches of a run; the tokens."""
        tokens: list[RecoveryToken] = []
        with BatchStream(self.target, run, recovery_token=after, timeout_s=60) as stream:
            for mini_batch in stream:
                if mini_batch.is_last:
                    tokens.append(stream.stepped())
                    stream.committed(tokens[-1])
                if len(tokens) == steps:
                    break
        return tokens

    def damage(self, run: str, trajectory_id: str) -> None:
        """Overwrite one byte of its first turn."""
        stream = keys.trajectory_keys(run, trajectory_id).turns
        with connect(self.url) as client:
            (first, *rest) = _entries(client, stream)
            record = bytearray(first[1][b"r"])
            record[-9] ^= 1
            client.delete(stream)
            client.xadd(stream, {"r": bytes(record)}, id=first[0])
            for entry_id, fields in rest:
                client.xadd(stream, fields, id=entry_id)

    def type(self, *words: str) -> str:
        """What `turnstream <words>` prints; it must end well."""
        told = CliRunner().invoke(cli.app, list(words))
        if told.exception is not None:
            raise told.exception
        return told.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A store and a batcher for all tests of a file; lines are wide enough for any words."""
    with EmbeddedServer() as server, pytest.MonkeyPatch.context() as environment:
        environment.chdir(tmp_path_factory.mktemp("typed"))
        environment.setenv("COLUMNS", "300")
        environment.setenv("TURNSTREAM_REDIS_URL", server.url)
        with BatcherThread(server.url) as batcher:
            yield Place(server.url, batcher.target)


def _entries(client: redis.Redis, stream: str) -> Any:
    return client.xrange(stream)
