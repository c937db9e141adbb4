"""Stores for services that are observed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from turnstream.store.client.connection import connect
from turnstream_server.embedded import EmbeddedServer


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """A store for each test: a replica has metrics of every run of its store."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with connect(server.url) as client:
        yield client
