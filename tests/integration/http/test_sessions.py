"""Sessions of agents, made by `group.session()` over Redis and over HTTP.

The route that ends a session is a stand-in here, in a real gateway with its real admission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx2
import pytest
import redis
from fastapi import FastAPI, Request
from fastapi.responses import Response

import turnstream
from testkit.services.gateway_thread import GatewayThread
from turnstream.errors import (
    ConflictError,
    InvalidConfigError,
    InvalidTurnError,
    RejectedError,
    StoreUnavailableError,
)
from turnstream.generator.api.sessions import GATEWAY_VARIABLE
from turnstream.store.client import keys
from turnstream.store.waits.wait_reasons import UNSEALED
from turnstream.types import TrajectoryKey
from turnstream.types.names import RunId
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway import service
from turnstream_server.gateway.bodies import json_response
from turnstream_server.gateway.proxy.errors import openai_error_of
from turnstream_server.gateway.state import Gateway
from turnstream_server.keys.sessions import SESSION, SESSIONS, Session, verified

pytestmark = pytest.mark.redis


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> dict[Session, Any]:
    """Bodies of the ends of sessions, by session; a second end is a conflict."""
    ended: dict[Session, Any] = {}
    make_app = service.make_app

    async def end(request: Request) -> Response:
        session: Session = request.scope[SESSION]
        if session.policy == "away":
            return openai_error_of(StoreUnavailableError("the store is away"))
        if not session.may_seal or any(session.key == each.key for each in ended):
            return openai_error_of(ConflictError("it has ended"))
        ended[session] = await request.json()
        return json_response({"state": "sealed"})

    def with_end(gateway: Gateway) -> FastAPI:
        app = make_app(gateway)
        app.add_route("/openai/v1/session/end", end, methods=["POST"])
        return app

    monkeypatch.setattr(service, "make_app", with_end)
    return ended


@pytest.fixture
def run(
    ended: dict[Session, Any], url_of: Callable[[str], str], new_name: str
) -> Iterator[turnstream.Run]:
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


def test_session_is_sealed_or_abandoned_by_its_owner(
    client: redis.Redis,
    run: turnstream.Run,
    ended: dict[Session, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with run.publisher() as publisher:
        group = publisher.group("g", 8)
        sealed, failed, left, of_agent = [group.session(sample) for sample in (0, 1, 2, 4)]
        trusted, away = group.session(3, may_seal=False), group.session(5, policy="away")
    with sealed:
        sealed.seal(1.5, tags={"a": "b"}, status="truncated", siblings="train")
        with pytest.raises(RejectedError, match="g/0/0 is sealed or abandoned"):
            sealed.seal()
        with pytest.raises(InvalidTurnError, match="siblings: 'all' is not one of train"):
            sealed.seal(siblings="all")
    with pytest.raises(KeyError), failed:
        raise KeyError("step" * 1_000)
    with left:
        pass
    with trusted:
        trusted.seal(awaits_reward=True)
    with of_agent:
        ended[content_of(client, of_agent.key)] = "sealed by the agent"
    with pytest.raises(StoreUnavailableError, match="the store is away"):
        away.seal(reward=1.0)
    assert not away.has_ended
    with pytest.raises(KeyError), away:
        raise KeyError("step")

    assert {key.key.sample: body for key, body in ended.items()} == {
        0: {"reward": 1.5, "tags": {"a": "b"}, "status": "truncated", "siblings": "train"},
        1: {"abandon": f"KeyError: '{'step' * 1_000}'"[:1_000]},
        2: {"abandon": UNSEALED},
        3: {"awaits_reward": True},
        4: "sealed by the agent",
    }
    assert "sample 2 left without a seal" in caplog.text
    assert "session g/5/0 was not abandoned: the store is away" in caplog.text
    assert not content_of(client, trusted.key).may_seal


async def test_async_session_is_the_same(run: turnstream.Run, ended: dict[Session, Any]) -> None:
    async with run.async_publisher() as publisher:
        group = publisher.group("g", 2)
        async with await group.session(0, expires_in_s=60) as session:
            await session.seal(1.0)
        async with await group.session(1) as session:
            await session.abandon("no")
        with pytest.raises(ZeroDivisionError):
            async with await group.session(0, attempt=1):
                _ = 1 / 0

    bodies = [
        {"reward": 1.0},
        {"abandon": "no"},
        {"abandon": "ZeroDivisionError: division by zero"},
    ]
    assert [*ended.values()] == bodies


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
