"""A batcher on a real store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from testkit.batchers import BatcherThread
from turnstream_server.embedded import EmbeddedServer


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """A server for each test: a batcher serves every run of its store."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def batcher(server: EmbeddedServer) -> Iterator[str]:
    """The address of a batcher."""
    torch.set_num_threads(1)
    with BatcherThread(server.url) as batcher:
        yield batcher.target
