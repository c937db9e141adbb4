"""Sessions of agents, made by `group.session()` over Redis and over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx2
import pytest
import redis

import turnstream
from testkit.services.gateway_thread import GatewayThread
from turnstream.errors import (
    InvalidConfigError,
    InvalidTurnError,
    RejectedError,
    StoreUnavailableError,
)
from turnstream.generator.api.sessions import GATEWAY_VARIABLE
from turnstream.store.client import keys
from turnstream.types import TrajectoryKey
from turnstream.types.names import RunId
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.keys.sessions import SESSIONS, Session, verified

pytestmark = pytest.mark.redis


@pytest.fixture
def run(url_of: Callable[[str], str], new_name: str) -> Iterator[turnstream.Run]:
    """A run of a connection to the gateway."""
    with turnstream.connect(url_of("http")) as opened:
        yield opened.create_run(new_name, batch_groups=1)


def content_of(client: redis.Redis, key: str) -> Session:
    return verified(key, cast("bytes", client.get(SESSIONS)), now_ms=0)


def test_session_has_the_variables_of_an_agent_and_opens_nothing(
    client: redis.Redis,
    server: EmbeddedServer,
    run: turnstream.Run,
    gateway: GatewayThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(GATEWAY_VARIABLE, "http://127.0.0.1:1")
    limits = {"policy": "tiny", "max_calls": 7, "max_tokens": 99, "may_seal": False}
    with run.publisher() as publisher:
        group = publisher.group("g/1", 4, prompt_uid="p")
        session = group.session(2, attempt=1, expires_in_s=60, **limits)
    with turnstream.connect(server.url) as store, store.run(run.name).publisher() as publisher:
        group = publisher.group("g/1", 4)
        with pytest.raises(StoreUnavailableError):
            group.session()
        monkeypatch.setenv(GATEWAY_VARIABLE, f"{gateway.base_url}/")
        named = [group.session(), group.session(gateway=gateway.base_url)]

    key = TrajectoryKey("g/1", 2, 1)
    made = Session(RunId(run.name), key, 4, prompt_uid="p", writer="http-local", **limits)
    assert content_of(client, session.key) == made._replace(expires_ms=session.expires_ms)
    assert session.trajectory == key
    assert session.key not in repr(session)
    assert {content_of(client, each.key).key for each in named} == {TrajectoryKey("g/1", 0)}
    assert client.exists(keys.run_keys(run.name).groups) == 0
    assert session.environment["ANTHROPIC_API_KEY"] == session.key
    answer = httpx2.get(
        f"{session.environment['OPENAI_BASE_URL']}/none",
        headers={"Authorization": f"Bearer {session.environment['OPENAI_API_KEY']}"},
    )
    assert answer.status_code == 404  # an accepted key, and no such route


def test_session_is_refused_without_a_gateway_or_where_the_group_is_open(
    server: EmbeddedServer, run: turnstream.Run
) -> None:
    with turnstream.connect(server.url) as store, store.run(run.name).publisher() as publisher:
        group = publisher.group("g", 1)
        with pytest.raises(InvalidConfigError, match=rf"gateway='http.*{GATEWAY_VARIABLE}"):
            group.session()
        with pytest.raises(InvalidConfigError, match="is a store"):
            group.session(gateway=server.url)
    with run.publisher() as publisher:
        groups: list[dict[str, Any]] = [{"num_needed": 1}, {"purpose": "eval"}]
        for wrong in groups:
            with pytest.raises(InvalidTurnError, match=f"^{next(iter(wrong))}: "):
                publisher.group("g", 2, **wrong).session()
        values: list[dict[str, Any]] = [
            {"sample": 2},
            {"max_calls": 0},
            {"policy": 3},
            {"may_seal": "no"},
            {"expires_in_s": 604_801},
        ]
        for wrong in values:
            with pytest.raises((InvalidTurnError, InvalidConfigError), match=next(iter(wrong))):
                publisher.group("g", 2).session(**wrong)
        group = publisher.group("g", 1)
        group.session()
        with pytest.raises(RejectedError, match="has sessions of agents"), group:
            pass
        with publisher.group("open", 1) as group:
            with pytest.raises(RejectedError, match="open under this publisher"):
                group.session()
            group.trajectory(0).abandon("test")
