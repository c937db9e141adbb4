"""Paths with line breaks and slashes, and bodies that take long to parse."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest
import redis

from testkit.requests.ingest import IngestClient, results_of, turn_fields
from testkit.requests.rest_api import RestApi
from testkit.turns import turn
from turnstream.batching.config import BatchingConfig
from turnstream.errors import RejectedError
from turnstream.http.problems import HEADER, WIRE_VERSION, error_of
from turnstream.store.run.runs import create_run
from turnstream_server.gateway import bodies as gateway_bodies
from turnstream_server.gateway.rest import bodies
from turnstream_server.ledger.admin.deletion import delete_run


def test_path_with_a_line_break_is_a_run_or_a_problem(api: RestApi) -> None:
    paths = ("%0A", "runs%0A/a", "runs/a%0Ab", "runs/a%0Ab/ledger", "runs/a/ledger%0A", "a%0D%0Ab")
    for path in paths:
        problem = api.refused("GET", path, 404)
        assert problem["detail"].startswith(("no run named", "no route has the path"))
    api.post("runs", name="two\nlines", settings={"batch_groups": 1})

    assert api.get("runs/two%0Alines")["run"] == "two\nlines"


def test_run_with_a_slash_has_routes_of_its_own(api: RestApi, run: str) -> None:
    for name in (f"{run}/ledger", f"{run}//a/", f"{run}/%2F"):
        part = quote(name, safe="")
        missing = api.refused("GET", f"runs/{part}", 404)
        assert missing["detail"].startswith(f"no run named '{name}'")
        assert api.post("runs", name=name, settings={"batch_groups": 1})["run"] == name
        assert api.post(f"runs/{part}/pause")["run"] == name
        assert api.get(f"runs/{part.replace('%2F', '%2f')}/ledger")["run"] == name
        api.refused("GET", f"runs/{part}/trajectories/g%2Fh/0", 404)

    unknown = api.refused("GET", f"runs/{run}/nothing", 404)
    assert unknown["detail"] == f"no route has the path '/v1/runs/{run}/nothing'"
    assert api.get(f"runs/{run}")["state"] == "open"


def test_path_with_an_id_is_bound_to_one_run(api: RestApi, client: redis.Redis, run: str) -> None:
    assert api.get(f"runs/{run}~1/config")["run"] == run
    delete_run(client, run)
    create_run(client, run, BatchingConfig(batch_groups=8, mini_batch_groups=8))

    for path in ("", "/config", "/credit", "/ledger"):
        found, expected = api.get(f"runs/{run}~2{path}"), api.get(f"runs/{run}{path}")
        for content in (found, expected):  # the memory of the server changes between two reads
            content.get("budget", {}).pop("used", None)
        assert found == expected
        gone = api.refused("GET", f"runs/{run}~1{path}", 404)
        assert gone["detail"].startswith(f"no run named '{run}'")
    item = {"group_id": "g", "num_samples": 1}
    for _ in range(2):  # a gateway keeps the id of a name for a second
        assert api.http.post(f"runs/{run}/groups", json={"items": [item]}).status_code == 200
        assert api.http.post(f"runs/{run}~1/groups", json={"items": [item]}).status_code == 404


def test_problem_of_a_number_that_json_lacks_is_json(api: RestApi, run: str) -> None:
    body = b'{"wait_s": NaN, "x": [-Infinity]}'
    headers = {"content-type": "application/json"}

    answer = api.http.post(f"runs/{run}/tasks", content=body, headers=headers)

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    problem = json.loads(answer.content, parse_constant=refuse)
    assert (answer.status_code, problem["field"], problem["value"]) == (422, "body.wait_s", "nan")


def test_requests_are_answered_while_a_large_body_is_parsed(
    api: RestApi, ingest: IngestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = turn_fields(turn("a" * 4_000, "CD"))
    member = {"group_id": "g", "num_samples": 64, "turn": 0, **sent}
    items = [{**member, "sample": number} for number in range(64)]
    is_parsing, may_end = threading.Event(), threading.Event()
    parse = bodies.from_json

    def parse_later(text: bytes, **options: Any) -> Any:
        is_parsing.set()
        assert may_end.wait(30)
        return parse(text, **options)

    monkeypatch.setattr(bodies, "from_json", parse_later)
    monkeypatch.setattr(gateway_bodies, "IN_THREAD_JSON_BYTES", 1 << 30)
    with ThreadPoolExecutor(1) as pool:
        try:
            posted = pool.submit(ingest.post, "turns", *items)
            assert is_parsing.wait(20)
            assert api.get("runs")["runs"]
        finally:
            may_end.set()
        assert {each["status"] for each in results_of(posted.result(30))} == {201}


def test_answers_have_the_wire_version_and_unknown_ones_are_refused(api: RestApi) -> None:
    for sent, status in ((None, 200), ("1", 200), ("2", 400), ("0", 400), ("x", 400)):
        answer = api.http.get("runs", headers={} if sent is None else {HEADER: sent})

        assert (answer.status_code, answer.headers[HEADER]) == (status, str(WIRE_VERSION)), sent
        if status == 400:
            error = error_of(answer.json())
            assert type(error) is RejectedError
            assert str(error).startswith(f"{HEADER} is '{sent}', and this gateway knows 1: ")
