"""Requests to plan again."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream.store.connection import connect
from turnstream_server.bus.frontier import ReplanRequest
from turnstream_server.bus.replans import request_replan


@pytest.fixture
def ask(server: Any):
    """Leaves a request in a run."""

    def leave(run: Any, step: int | None = None) -> ReplanRequest:
        with connect(server.url) as client:
            return ReplanRequest(request_replan(client, run.name, step=step), step or 0)

    return leave
