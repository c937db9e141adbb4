"""A gateway with an engine double, and sessions of agents on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import redis

from testkit.services.agents import Agent
from testkit.services.engine_doubles import EngineDouble, engine_double
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from turnstream_server.gateway.config import EngineAddress


@pytest.fixture
def engine() -> Iterator[EngineDouble]:
    """An engine double of vLLM."""
    with engine_double("vllm") as double:
        yield double


@pytest.fixture
def gateway(new_gateway: Callable[..., GatewayThread], engine: EngineDouble) -> GatewayThread:
    """A gateway that samples from the engine."""
    return new_gateway(engines=(EngineAddress.parse(engine.address),))


@pytest.fixture
def run(client: redis.Redis, new_run: Callable[..., str]) -> str:
    """A new run."""
    return new_run(client)


@pytest.fixture
def reader(client: redis.Redis, run: str) -> RunReader:
    """The run, as the store has it."""
    return RunReader(client, run)


@pytest.fixture
def open_session(gateway: GatewayThread, run: str) -> Callable[..., Agent]:
    """`open_session(sample=1)` returns an agent with a session key of the run, or of another."""

    def open_session(of_run: str = run, **fields: Any) -> Agent:
        body = {"group_id": "g", "sample": 0, "num_samples": 2, **fields}
        url = f"{gateway.base_url}/v1/runs/{of_run}/sessions"
        answer = httpx2.post(url, json=body).raise_for_status().json()
        return Agent(f"{gateway.base_url}/openai/v1", answer["key"])

    return open_session


@pytest.fixture
def agent(open_session: Callable[..., Agent]) -> Agent:
    """An agent of sample 0 of group g."""
    return open_session()
