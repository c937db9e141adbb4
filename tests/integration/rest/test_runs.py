"""Runs, prompts, tasks and rewards over HTTP."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
import redis

from testkit import ids, wait_until
from testkit.requests.ingest import IngestClient
from testkit.requests.rest_api import RestApi, content_of
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from turnstream.batching.config import GroupFilter
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.run.configs import read_config
from turnstream.store.run.tasks import Prompt, add_prompts
from turnstream.types import TrajectoryKey
from turnstream_server.embedded import EmbeddedServer

_numbers = itertools.count(1)


@pytest.fixture
def new_name() -> str:
    return f"rest-{next(_numbers)}"


def add(client: redis.Redis, run: str, *uids: str, num_samples: int = 1) -> None:
    prompts = [
        Prompt(prompt_uid=uid, payload=b"\xff" + uid.encode(), num_samples=num_samples)
        for uid in uids
    ]
    add_prompts(client, run, prompts)


def test_runs_are_listed_in_sorted_pages(api: RestApi, new_name: str) -> None:
    names = [f"{new_name}-{number}" for number in range(3)]
    for name in reversed(names):
        api.post("runs", name=name, settings={"batch_groups": 1})

    first = api.get("runs", from_run=names[0], limit=2)
    second = api.get("runs", from_run=first["next_run"], limit=1)
    whole = api.get("runs")

    assert [line["run"] for line in first["runs"]] == names[:2]
    assert [line["run"] for line in second["runs"]] == names[2:]
    assert first["next_run"] == names[2]
    assert whole["next_run"] is None
    assert {*names} <= {line["run"] for line in whole["runs"]}
    api.refused("GET", "runs?limit=1001", 422)


def test_run_is_created_once_with_the_same_settings(
    api: RestApi, client: redis.Redis, new_name: str
) -> None:
    kept = [{"kind": "mean_range", "low": 0.2, "high": 0.8}]
    settings = {"batch_groups": 2, "estimator": "rloo", "group_filters": kept}

    first = api.http.post("runs", json={"name": new_name, "settings": settings})
    again = api.http.post("runs", json={"name": new_name, "settings": settings})

    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert read_config(client, new_name)[1].group_filters == (
        GroupFilter(kind="mean_range", low=0.2, high=0.8),
    )
    problem = api.refused(
        "POST", "runs", 409, name=new_name, settings={**settings, "batch_groups": 3}
    )
    assert "batch_groups is 2, not 3" in problem["detail"]


WRONG_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"batch_group": 2}, "batch_group"),
    ({}, "batch_groups"),
    ({"batch_groups": "2"}, "batch_groups"),
    ({"batch_groups": None}, "batch_groups"),
    ({"batch_groups": 1e400}, "batch_groups"),
    ({"batch_groups": 2, "estimator": ["grpo"]}, "estimator"),
    ({"batch_groups": 2, "extra_columns": [{"name": 1}]}, "extra_columns"),
    ({"batch_groups": 2, "group_filters": {"a": []}}, "group_filters"),
    ({"batch_groups": 2, "component_weights": [[]]}, "component_weights"),
    ({"batch_groups": 2, "lease_s": -1}, "lease_s"),
]


def test_wrong_setting_is_named(api: RestApi, new_name: str) -> None:
    for settings, field in WRONG_SETTINGS:
        body = json.dumps({"name": new_name, "settings": settings}).replace("Infinity", "1e400")
        response = api.http.post("runs", content=body, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["field"]) == (422, field), settings
    assert new_name not in {line["run"] for line in api.get("runs")["runs"]}


def test_state_of_a_run_changes_and_changes_back(api: RestApi, run: str) -> None:
    def change(command: str, **fields: Any) -> tuple[bool, str]:
        content = api.post(f"runs/{run}/{command}", **fields)
        return content["changed"], content["state"]

    assert change("pause", reason="judge is down") == (True, "paused")
    assert change("pause") == (False, "paused")
    assert api.get(f"runs/{run}")["paused"] == "judge is down"
    assert change("resume") == (True, "open")
    assert change("close", leftover="carry") == (True, "closed")
    assert api.refused("POST", f"runs/{run}/close", 409, leftover="drop")
    assert change("reopen") == (True, "open")
    assert api.http.post(f"runs/{run}/pause").json()["changed"]  # without a body


def test_settings_are_revised_from_a_step_on(api: RestApi, run: str) -> None:
    sent = {"from_step": 3, "settings": {"max_staleness": 2}}
    content = content_of(api.http.patch(f"runs/{run}/config", json=sent))

    assert content["changes"] == [{"name": "max_staleness", "before": 1, "after": 2}]
    assert api.get(f"runs/{run}")["pending_revisions"] == {
        "revision 2, from step 3": "max_staleness=2"
    }
    assert content_of(api.http.patch(f"runs/{run}/config", json=sent))["changes"] == []
    refused = {"from_step": 3, "settings": {"aggregation": "constant"}}
    assert api.refused("PATCH", f"runs/{run}/config", 422, **refused)["field"]


def test_deleted_run_is_gone_and_its_name_is_free(api: RestApi, run: str) -> None:
    deleted = content_of(api.http.delete(f"runs/{run}"))

    assert deleted == {"deleted": [run], "num_trajectories": 0}
    api.refused("GET", f"runs/{run}", 404)
    api.refused("DELETE", f"runs/{run}", 404)
    api.post("runs", name=run, settings={"batch_groups": 1})
    assert api.get(f"runs/{run}")["run"] == f"{run}~2"


def test_body_above_a_megabyte_is_refused_before_it_is_parsed(api: RestApi) -> None:
    headers = {"Content-Type": "application/json"}
    response = api.http.post("runs", content=iter([b" " * 1_000_000] * 2), headers=headers)

    assert response.status_code == 413


def test_repeated_prompts_are_added_once(api: RestApi, client: redis.Redis, run: str) -> None:
    sent = {
        "first": 1,
        "prompts": [
            {"prompt_uid": "a", "text": "6 x 7?", "num_samples": 2},
            {"prompt_uid": "b", "payload": "/w==", "num_samples": 1},
        ],
    }

    assert api.post(f"runs/{run}/prompts", **sent) == {"num_added": 2}
    assert api.post(f"runs/{run}/prompts", **sent) == {"num_added": 2}
    stored: Any = client.hmget(keys.run_keys(run).prompts, "1", "2")
    assert stored == [b"2/2:a:6 x 7?", b"1/1:b:\xff"]
    other = {**sent, "prompts": [{"prompt_uid": "c", "text": "", "num_samples": 2}]}
    api.refused("POST", f"runs/{run}/prompts", 409, **other)
    wrong = {"prompts": [{"prompt_uid": "c", "payload": "?", "num_samples": 2}]}
    assert api.refused("POST", f"runs/{run}/prompts", 422, **wrong)["field"] == "prompts.0.payload"


def test_task_is_held_until_a_prompt_comes(
    api: RestApi, gateway: GatewayThread, client: redis.Redis, run: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(api.post, f"runs/{run}/tasks", wait_s=50)
        wait_until(lambda: gateway.num_requests == 1)
        add(client, run, "a", num_samples=2)
        task = held.result(20)

    assert (task["group_id"], task["payload"], task["text"]) == ("a#1", "/2E=", None)
    assert task["trajectories"] == [{"sample": n, "attempt": 0} for n in range(2)]
    entries = RunReader(client, run).ledger()
    assert entries == {"a%231/0/0": "open:1:test", "a%231/1/0": "open:1:test"}
    turn = {"turn": 0, "prompt_ids": [1], "response_ids": [2], "seal": {"reward": 1.0}}

    with IngestClient(gateway, run, writer=task["writer"]) as ingest:
        (result,) = ingest.results("turns", {"group_id": task["group_id"], "sample": 0, **turn})

    assert (result["status"], result["state"]) == (201, "sealed")
    assert RunReader(client, run).states() == {"a%231/0/0": "sealed", "a%231/1/0": "open"}


def test_requests_of_one_writer_take_different_tasks(
    new_gateway: Callable[..., GatewayThread], client: redis.Redis, run: str
) -> None:
    """Two requests may read the same offer. The second one must not get the first one's task."""
    uids = [f"p{n}" for n in range(24)]
    with RestApi(new_gateway(), writer="w") as one, RestApi(new_gateway(), writer="w") as other:
        for api in (one, other):  # a first request makes schemas, which is not safe in threads
            api.refused("POST", f"runs/{run}/tasks", 429)
        add(client, run, *uids)
        with ThreadPoolExecutor(8) as pool:
            taking = [
                pool.submit(api.post, f"runs/{run}/tasks", wait_s=10)
                for api in (one, other) * (len(uids) // 2)
            ]
            taken = [each.result(60)["prompt_uid"] for each in taking]

    assert sorted(taken) == sorted(uids)


def test_request_without_a_task_says_why_and_when_to_retry(api: RestApi, run: str) -> None:
    response = api.http.post(f"runs/{run}/tasks", json={"wait_s": 0})

    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["reasons"][0] == {
        "kind": "not_ready",
        "sentence": "the run was given no prompt",
        "facts": {"awaited": "task", "waited_s": 0.0, "prompts": 0, "left": 0, "given": 0},
    }
    api.post(f"runs/{run}/close")
    assert api.refused("POST", f"runs/{run}/tasks", 409)["type"].endswith("/end-of-run")


def test_disconnected_client_takes_no_task(
    api: RestApi, gateway: GatewayThread, client: redis.Redis, run: str
) -> None:
    with pytest.raises(httpx2.ReadTimeout):
        api.http.post(f"runs/{run}/tasks", json={"wait_s": 50}, timeout=0.3)
    wait_until(lambda: gateway.num_requests == 0)
    add(client, run, "a")

    assert api.post(f"runs/{run}/tasks", wait_s=10)["group_id"] == "a#1"


def test_held_requests_end_when_the_gateway_stops(
    api: RestApi, gateway: GatewayThread, run: str
) -> None:
    with ThreadPoolExecutor(2) as pool:
        task = pool.submit(api.http.post, f"runs/{run}/tasks", json={"wait_s": 50})
        version = pool.submit(api.http.get, f"runs/{run}/versions?wait_s=50")
        wait_until(lambda: gateway.num_requests == 2)
        gateway.stop()

        assert [each.result(5).status_code for each in (task, version)] == [503, 503]


def test_held_requests_use_no_connection_of_the_gateway(
    new_gateway: Callable[..., GatewayThread], client: redis.Redis, run: str
) -> None:
    gateway = new_gateway(max_store_connections=2)
    with RestApi(gateway, writer="w") as api, ThreadPoolExecutor(8) as pool:
        held = [pool.submit(api.post, f"runs/{run}/tasks", wait_s=50) for _ in range(8)]
        wait_until(lambda: gateway.num_requests == 8)

        assert content_of(api.http.get(f"runs/{run}/versions", timeout=5))["newest"] is None
        add(client, run, *"abcdefgh")
        assert len({each.result(30)["group_id"] for each in held}) == 8


def test_left_task_abandons_what_its_writer_has_open(
    api: RestApi, gateway: GatewayThread, client: redis.Redis, run: str
) -> None:
    add(client, run, "a", num_samples=3)
    task = api.post(f"runs/{run}/tasks")
    sealed = {"group_id": "a#1", "sample": 1, "turn": 0, "prompt_ids": [1], "response_ids": [2]}
    api.post(f"runs/{run}/turns", items=[{**sealed, "seal": {"reward": 0.0}}])
    end = {name: task[name] for name in ("group_id", "trajectories")}

    with RestApi(gateway, writer="other") as other:
        assert other.post(f"runs/{run}/tasks/end", **end) == {"abandoned": []}
    content = api.post(f"runs/{run}/tasks/end", **end, reason="no engine")

    assert content["abandoned"] == [{"sample": 0, "attempt": 0}, {"sample": 2, "attempt": 0}]
    assert RunReader(client, run).ledger() == {
        "a%231/0/0": "abandoned:no engine",
        "a%231/1/0": "sealed:1",
        "a%231/2/0": "abandoned:no engine",
    }
    assert api.post(f"runs/{run}/tasks/end", **end)["abandoned"] == []


def test_rewards_have_one_result_each(
    api: RestApi, server: EmbeddedServer, client: redis.Redis, run: str
) -> None:
    with Publisher(server.url, run) as publisher, publisher.group("g", num_samples=2) as group:
        for awaits, trajectory in zip((True, False), group, strict=True):
            trajectory.append(ids("ab"), ids("CD"))
            trajectory.seal(reward=None if awaits else 0.0, awaits_reward=awaits)
    posted = {"group_id": "g", "sample": 0, "reward": 0.5}
    items = [posted, posted, {**posted, "reward": 1}, {**posted, "sample": 1}]

    results = api.post(f"runs/{run}/rewards", items=items)["results"]

    missing = {"group_id": "g", "sample": 1}
    problem = api.refused("POST", f"runs/{run}/rewards", 422, items=[items[2], missing])
    assert problem["field"] == "items.1.reward"
    assert [each["status"] for each in results] == [201, 201, 409, 409]
    assert [each.get("outcome") for each in results] == ["posted", "duplicate", None, None]
    assert "sealed with its reward" in results[3]["problem"]["detail"]
    (event,) = [
        event for event in RunReader(client, run).events() if hasattr(event, "reward_components")
    ][-1:]
    assert (event.key, event.reward) == (TrajectoryKey("g", 0), 0.5)
