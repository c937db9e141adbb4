"""Requests with session keys: where they are accepted, and the shape of their errors."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, cast

import httpx2
import pytest
import redis
from starlette.types import Receive, Scope, Send

from testkit.requests.rest_api import RestApi
from testkit.services.gateway_thread import GatewayThread
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.types import TrajectoryKey
from turnstream.types.names import RunId
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.admission import LimitedApp
from turnstream_server.gateway.bodies import json_response
from turnstream_server.gateway.config import GatewayOptions
from turnstream_server.gateway.polls import Polls
from turnstream_server.gateway.rest.runs.sessions import MAX_TEXT
from turnstream_server.gateway.state import Gateway
from turnstream_server.keys.records import KeyLimits, key_id_of, key_of, owner_of
from turnstream_server.keys.sessions import SESSION, SESSIONS, Session, verified
from turnstream_server.keys.store import create_key, revoke_key

pytestmark = pytest.mark.redis

AGENTS = ("/openai/v1/models", "/anthropic/v1/messages")
ELSEWHERE = ("/t/demo/g/0/v1/models", "/v1/ping", "/api/v1/client/config", "/metrics", "/openai")
SESSION_OF_RUN = Session(RunId("demo~2"), TrajectoryKey("g/1", 3), 8, expires_ms=2**53 - 1)


class Doors(NamedTuple):
    """A gateway whose routes answer with key and session of a request."""

    gateway: Gateway
    http: httpx2.AsyncClient

    async def get(self, path: str, secret: str = "", **headers: str) -> httpx2.Response:
        """Request a path, with a key as bearer."""
        if secret:
            headers["Authorization"] = f"Bearer {secret}"
        return await self.http.get(path, headers=headers)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    key, session = key_of(scope), scope.get(SESSION)
    content = {"key": key.name, "roles": [*key.roles], "runs": key.runs, "session": session}
    await json_response(content)(scope, receive, send)


@contextlib.asynccontextmanager
async def doors(url: str, **options: Any) -> AsyncIterator[Doors]:
    async with connect_async(url) as client:
        gateway = Gateway(GatewayOptions(redis_url=url, **options), client, Polls(client, client))
        transport = httpx2.ASGITransport(LimitedApp(echo, gateway))
        async with (
            gateway.resources,
            httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
        ):
            yield Doors(gateway, http)


def error_of(answer: httpx2.Response, status: int) -> dict[str, Any]:
    """Return the error in an answer of the proxy with this status, in the shape of its API."""
    assert answer.status_code == status, answer.text
    content = answer.json()
    if answer.request.url.path.startswith("/anthropic/"):
        assert (content.keys(), content["type"]) == ({"type", "error"}, "error")
        assert content["error"].keys() == {"type", "message"}
        return content["error"]
    assert content.keys() == {"error"}
    assert content["error"].keys() == {"message", "type", "param", "code"}
    return content["error"]


async def test_paths_of_agents_take_session_keys_alone(
    server: EmbeddedServer, client: redis.Redis
) -> None:
    maker = create_key(client, "maker", roles=["produce", "read"])
    session = SESSION_OF_RUN._replace(key_id=key_id_of(maker), writer="http-maker")
    for requires_key in (True, False):
        async with doors(server.url, requires_key=requires_key) as opened:
            text = await opened.gateway.sessions.sign(session)
            for path in AGENTS:
                for given in ("", maker, "tml-other"):
                    error = error_of(await opened.get(path, given), 401)
                    assert "POST /v1/runs/{run}/sessions" in error["message"]
                    assert error["type"] == "authentication_error"
                    assert error.get("code", "unknown-key") == "unknown-key"
                for answer in (
                    await opened.get(path, text),
                    await opened.get(path, **{"x-api-key": text}),
                ):
                    assert answer.json() == {
                        "key": "maker",
                        "roles": [],
                        "runs": ["demo"],
                        "session": [*session._replace(key=[*session.key])],
                    }
                changed = error_of(await opened.get(path, text[:-1]), 401)
                assert changed["type"] == "authentication_error"
            for path in ELSEWHERE:
                refused = await opened.get(path, text)
                assert refused.status_code == 403
                assert "for paths below /openai and /anthropic" in refused.text
            assert (await opened.get(ELSEWHERE[0], maker)).json()["session"] is None
    revoke_key(client, "maker")


async def test_session_keys_have_the_rates_of_their_api_key_together(
    server: EmbeddedServer, client: redis.Redis
) -> None:
    limits = KeyLimits(requests_per_s=0.01, max_body_bytes=1_000)
    maker = create_key(client, "slow", roles=["produce"], limits=limits)
    session = SESSION_OF_RUN._replace(key_id=key_id_of(maker))
    async with doors(server.url, requires_key=True) as opened:
        texts = [
            await opened.gateway.sessions.sign(session._replace(key=TrajectoryKey("g", sample)))
            for sample in range(3)
        ]
        answers = [await opened.get(AGENTS[0], each) for each in texts]
        tried = {"Authorization": f"Bearer {texts[0]}", "Content-Type": "application/json"}
        large = await opened.http.post(AGENTS[0], content=b"0" * 1_001, headers=tried)

    assert [each.status_code for each in answers] == [200, 429, 429]
    assert "may use 0.01 requests per second" in error_of(answers[1], 429)["message"]
    assert 60 <= int(answers[1].headers["Retry-After"]) <= 100
    assert "1000 bytes" in error_of(large, 413)["message"]
    revoke_key(client, "slow")


def test_new_session_key_has_its_trajectory_and_opens_nothing(
    client: redis.Redis, run: str, new_gateway: Callable[..., GatewayThread]
) -> None:
    maker = create_key(client, f"{run} maker", roles=["produce"], runs=[run])
    numbers = {"max_calls": 3, "max_tokens": 2**40, "expires_in_s": 60}
    texts = {"prompt_uid": "\x01" * MAX_TEXT, "policy": "\U0001f9ea" * MAX_TEXT}
    body = {"group_id": "g/\u00fc" * 30, "sample": 1, "attempt": 2, "num_samples": 4}
    body = {**body, **texts, **numbers, "may_seal": False}
    gateway = new_gateway(requires_key=True)
    with httpx2.Client(base_url=gateway.base_url, headers={"X-API-Key": maker}) as http:
        made = http.post(f"/v1/runs/{run}/sessions", json=body).raise_for_status().json()
        before_ms = made["expires_ms"] - 1
        found = verified(made["key"], cast("bytes", client.get(SESSIONS)), now_ms=before_ms)
        used = http.get("/openai/v1/none", headers={"X-API-Key": made["key"]})

    assert found == Session(
        RunId(run),
        TrajectoryKey(cast("str", body["group_id"]), 1, 2),
        4,
        prompt_uid=texts["prompt_uid"],
        policy=texts["policy"],
        max_calls=3,
        max_tokens=2**40,
        expires_ms=made["expires_ms"],
        may_seal=False,
        key_id=key_id_of(maker),
        owner=owner_of(f"{run} maker"),
        writer=f"http-{run} maker",
    )
    assert made["environment"] == {
        "OPENAI_BASE_URL": f"{gateway.base_url}/openai/v1",
        "OPENAI_API_KEY": made["key"],
        "ANTHROPIC_BASE_URL": f"{gateway.base_url}/anthropic",
        "ANTHROPIC_API_KEY": made["key"],
    }
    assert used.status_code == 404  # no such route, and an accepted key
    assert client.exists(keys.run_keys(run).groups) == 0


WRONG = {
    ("group_id", "min"): "",
    ("group_id", "long"): "\u00fc" * 200,  # 1,200 characters in a key
    ("sample", "of"): 4,
    ("sample", "least"): -1,
    ("attempt", "most"): 10**6,
    ("num_samples", "least"): 0,
    ("num_samples", "most"): 10**6,
    ("prompt_uid", "long"): "p" * 257,
    ("policy", "long"): "p" * 257,
    ("max_calls", "least"): 0,
    ("max_tokens", "most"): 2**53,
    ("expires_in_s", "most"): 7 * 86_400 + 1,
    ("may_seal", "type"): "yes",
    ("other", "unknown"): 1,
}


def test_wrong_session_is_refused_with_its_field_and_the_limit(api: RestApi, run: str) -> None:
    right = {"group_id": "g", "sample": 0, "num_samples": 4}
    path = f"runs/{run}/sessions"
    for (field, why), value in WRONG.items():
        problem = api.refused("POST", path, 422, **{**right, field: value})
        assert problem["field"].rpartition(".")[2] == field, (field, why, problem)
    late = api.refused("POST", path, 422, **right, expires_in_s=604_801)
    assert (late["value"], late["detail"][-6:]) == (604_801, "604800")
    assert api.refused("POST", "runs/none/sessions", 404, **right)["type"].endswith("/not-found")


def test_session_key_names_the_address_of_the_setting(
    run: str, new_gateway: Callable[..., GatewayThread]
) -> None:
    for options, host, address in (
        ({"public_url": "https://gw.lab/ts"}, "10.0.0.7", "https://gw.lab/ts"),
        ({}, "10.0.0.7:80", "http://10.0.0.7:80"),
    ):
        with RestApi(new_gateway(**options)) as api:
            api.http.headers["Host"] = host
            made = api.post(f"runs/{run}/sessions", group_id="g", sample=0, num_samples=1)
        assert made["environment"]["OPENAI_BASE_URL"] == f"{address}/openai/v1"
