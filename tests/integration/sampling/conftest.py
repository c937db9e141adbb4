"""A base model with snapshots, and sampling sessions of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import redis
import torch

from testkit.services import servers
from testkit.training.sampling import ModelFolders, SamplingClient
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.operations.samplers import SampleQueue
from turnstream_server.sampling.service import SampleEngine, SampleLoop

torch.set_num_threads(1)


server = servers.shared_server


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture
def sessions(client: redis.Redis, server: EmbeddedServer) -> SamplingClient:
    return SamplingClient(client, server.url)


@contextlib.contextmanager
def run_loop(
    client: redis.Redis, base_model: str, engine: SampleEngine, **options: int
) -> Iterator[None]:
    """Run a loop in the block."""
    stop = threading.Event()
    samples = SampleQueue(client, base_model, sampler="s0")
    loop = SampleLoop(samples, engine, **options)
    thread = threading.Thread(target=loop.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def looping() -> Callable[..., AbstractContextManager[None]]:
    """`looping(client, base_model, engine)` runs a loop in its block."""
    return run_loop
