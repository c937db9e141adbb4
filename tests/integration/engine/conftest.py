"""A base model, and hosts of models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.training.hosted import ModelHost, new_model_host
from testkit.training.training import make_model
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.models.policy import save_policy


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small base model."""
    folder = tmp_path_factory.mktemp("base") / "tiny"
    save_policy(make_model(), folder)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """A server for each file: a batcher serves every run of its store."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def model_host(server: EmbeddedServer, base: Path, tmp_path: Path) -> ModelHost:
    """A base model without hosted models yet."""
    return new_model_host(server.url, base, tmp_path)
