"""Keys, and what belongs to a key."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx2

from testkit import config
from testkit.services.gateway_thread import GatewayThread
from testkit.services.gateways import tinker_paths
from testkit.training.canned_worker import CannedWorker
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.keys.store import create_key

_PATHS = tinker_paths()
ROUTES = sorted((method, path) for path, methods in _PATHS.items() for method in methods)


def test_every_route_but_health_and_links_needs_a_key(gateway: GatewayThread):
    statuses = {}
    for headers in ({}, {"X-API-Key": "other"}, {"Authorization": "Bearer other"}):
        with httpx2.Client(base_url=gateway.base_url, headers=headers) as http:
            for method, path in ROUTES:
                answer = http.request(method, re.sub(r"{\w+}", "x", path))
                statuses.setdefault((method, path), set()).add(answer.status_code)

    assert len(ROUTES) > 30
    assert statuses.pop(("get", "/api/v1/healthz")) == {200}
    assert statuses.pop(("get", "/healthz")) == {200}
    assert statuses.pop(("get", "/readyz")) == {200}
    assert statuses.pop(("get", "/metrics")) == {200, 401}  # no key is needed here
    assert statuses.pop(("get", "/api/v1/downloads/{token}/{name}")) == {404}
    assert set(map(frozenset, statuses.values())) == {frozenset({401})}


def test_only_stored_keys_with_the_role_train_are_accepted(
    server: EmbeddedServer, new_gateway: Callable[..., GatewayThread], new_api: Callable[..., Any]
):
    with connect(server.url) as client:
        keys = [create_key(client, f"tinker-{role}", roles=[role]) for role in ("train", "read")]
    gateway = new_gateway(requires_key=True)

    answers = [new_api(gateway, key=key).post("client/config") for key in (*keys, "tml-other")]
    headers = {"X-API-Key": "", "Authorization": f"Bearer {keys[0]}"}  # an unset variable
    bearer = httpx2.post(f"{gateway.base_url}/api/v1/client/config", headers=headers)

    assert [answer.status_code for answer in answers] == [200, 403, 401]
    assert answers[1].json() == {"detail": "key 'tinker-read' has the roles read, needed is train"}
    assert bearer.status_code == 200


def test_key_of_some_runs_trains_on_no_other_run(
    server: EmbeddedServer,
    worker: CannedWorker,
    new_gateway: Callable[..., GatewayThread],
    new_api: Callable[..., Any],
):
    with connect(server.url) as client:
        for run in ("own", "other"):
            create_run(client, run, config())
        key = create_key(client, "scoped", roles=["train"], runs=["own"])
    api = new_api(new_gateway(requires_key=True), key=key)
    model = api.model()

    answers = {
        run: api.post("forward_backward_run", model_id=model, seq_id=1, run=run, loss_fn_config={})
        for run in ("other", "own")
    }

    assert answers["other"].status_code == 403
    assert answers["other"].json()["detail"].endswith("may use the runs own, and not 'other'")
    assert answers["own"].status_code == 200


def test_things_of_another_key_do_not_exist(
    api: Any, gateway: GatewayThread, worker: CannedWorker, new_api: Callable[..., Any]
):
    session = api.session()
    model, sampler = api.model(session), api.sampler(session)
    saved = api.answer("save_weights", model_id=model, seq_id=1, path="s1")["request_id"]
    path = api.result(saved)["path"]
    sampled = api.sample(sampler, 1).json()["request_id"]
    api.result(sampled)
    other = new_api(gateway, key="tml-other")
    own_model = other.model()

    posts = {
        "session_heartbeat": {"session_id": session},
        f"sessions/{session}/finish": {},
        "get_info": {"model_id": model},
        "create_model": {"session_id": session, "model_seq_id": 1, "base_model": api.base.name},
        "create_sampling_session": {
            "session_id": session,
            "sampling_session_seq_id": 4,
            "base_model": api.base.name,
        },
        "optim_step": {"model_id": model, "seq_id": 2},
        "weights_info": {"tinker_path": path},
        f"training_runs/{model}/checkpoints/weights/s1/publish": {},
    }
    answers = [other.post(route, **content) for route, content in posts.items()]
    answers += [other.post("retrieve_future", request_id=each) for each in (saved, sampled)]
    answers += [other.post("cancel_future", request_id=each) for each in (saved, sampled)]
    answers += [other.train(model, 2), other.sample(sampler, 2)]
    gets = (f"sessions/{session}", f"training_runs/{model}", f"samplers/{sampler}")
    answers += [other.http.get(route) for route in gets]
    answers.append(other.http.get(f"training_runs/{model}/checkpoints"))
    answers.append(other.http.delete(f"training_runs/{model}/checkpoints/weights/s1"))
    from_path = {"session_id": other.session(), "model_path": path, "sampling_session_seq_id": 1}
    answers.append(other.post("create_sampling_session", **from_path))
    loaded = other.answer("load_weights", model_id=own_model, seq_id=1, path=path, optimizer=False)

    assert [each.status_code for each in answers] == [404] * len(answers)
    assert other.result(loaded["request_id"])["category"] == "user"
    assert other.get("checkpoints")["checkpoints"] == []
    assert [each["training_run_id"] for each in other.get("training_runs")["training_runs"]] == [
        own_model
    ]


def test_unreadable_bodies_are_errors_of_the_caller(api: Any):
    routes = [
        path.removeprefix("/api/v1/")
        for method, path in ROUTES
        if method == "post"
        and not path.endswith(("/config", "/dynamic_config", "/telemetry", "/create_session"))
        and "{" not in path
    ]

    for body in (b"", b"[]", b"\xff", b"[" * 5_000, b'{"session_id": 3}'):
        for route in routes:
            answer = api.http.post(route, content=body)
            assert answer.status_code == 400, (route, body)
            assert answer.json()["detail"]
