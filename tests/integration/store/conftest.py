"""A run that is driven script by script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit.runs.run_driver import Drive, RunDriver
from testkit.services import servers

server, own_server = servers.server_of_each_kind, servers.own_server_of_each_kind


@pytest.fixture
def drive(client: redis.Redis, new_run: Callable[..., str]) -> Drive:
    """`drive(batch_groups=..., on=another_client)` creates a run and returns its driver."""

    def create(*, on: redis.Redis = client, **settings: Any) -> RunDriver:
        return RunDriver(on, new_run(on, **settings))

    return create


@pytest.fixture
def run(drive: Drive) -> RunDriver:
    """A run with capacity for two hundred groups."""
    return drive()


@pytest.fixture
def missing_run(client: redis.Redis) -> RunDriver:
    """A driver of a run that was never created."""
    return RunDriver(client, "nobody")
