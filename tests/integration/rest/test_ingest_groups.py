"""Groups over HTTP: admission that waits for nothing, and groups that are opened again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from testkit.requests.ingest import ARROW, IngestClient, arrow_body, results_of, turn_fields
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from testkit.turns import turn
from turnstream.store.run.runs import close_run


@pytest.fixture
def small(
    gateway: GatewayThread, client: redis.Redis, new_run: Callable[..., str]
) -> Iterator[IngestClient]:
    """A client of a run with capacity for two groups, each of at most four samples."""
    run = new_run(client, batch_groups=2, max_staleness=0, max_planned_ahead=0, max_samples=4)
    with IngestClient(gateway, run) as ingest:
        yield ingest


_GROUPS: list[dict[str, Any]] = [
    {"group_id": "a", "num_samples": 2, "num_needed": 1, "prompt_uid": "p"},
    {"group_id": "b", "num_samples": 3, "samples": [1], "purpose": "eval"},
    {"group_id": "c", "num_samples": 1, "samples": []},
]


@pytest.mark.parametrize("form", ["json", "arrow"])
def test_groups_are_opened_with_their_samples(
    ingest: IngestClient, reader: RunReader, form: str
) -> None:
    if form == "json":
        results = ingest.results("groups", *_GROUPS)
    else:
        results = results_of(ingest.send("groups", arrow_body(_GROUPS), content_type=ARROW))

    assert [(each["status"], each["open_samples"]) for each in results] == [
        (201, [0, 1]),
        (201, [1]),
        (201, []),
    ]
    assert reader.ledger() == dict.fromkeys(["a/0/0", "a/1/0", "b/1/0"], "open:1:test")
    assert [(e.group_id, e.prompt_uid, e.num_needed, e.purpose) for e in reader.events()] == [
        ("a", "p", 1, "train"),
        ("b", "", 3, "eval"),
        ("c", "", 1, "train"),
    ]


def test_group_opened_again_has_the_same_result(
    gateway: GatewayThread, ingest: IngestClient, reader: RunReader
) -> None:
    item = {"group_id": "a", "num_samples": 2}
    first = ingest.results("groups", item)

    repeated = ingest.results("groups", item)
    gateway.stop()
    gateway.start()
    restarted = ingest.results("groups", item)
    (conflict,) = ingest.results("groups", {**item, "num_samples": 3})

    assert first == repeated == restarted
    assert len(reader.events()) == 1
    assert conflict["status"] == 409
    assert "was opened with 2 samples, not 3" in conflict["problem"]["detail"]


def test_samples_of_a_group_may_have_several_writers(
    ingest: IngestClient, gateway: GatewayThread, reader: RunReader
) -> None:
    ingest.results("groups", {"group_id": "g", "num_samples": 2, "samples": [0]})

    with IngestClient(gateway, ingest.run, writer="other") as other:
        opened = other.results("groups", {"group_id": "g", "num_samples": 2})
        results = [
            each.turn(0, turn("ab", "C"), sample=sample, num_samples=2, seal={"reward": 1.0})
            for sample, each in enumerate((ingest, other))
        ]

    assert opened[0]["open_samples"] == [1]
    assert [each["status"] for each in results] == [201, 201]
    assert reader.states() == {"g/0/0": "sealed", "g/1/0": "sealed"}


@pytest.mark.parametrize("route", ["groups", "turns", "trajectories"])
def test_group_without_capacity_is_429_with_reasons(small: IngestClient, route: str) -> None:
    small.results("groups", *[{"group_id": f"full-{n}", "num_samples": 1} for n in range(2)])
    head = {"group_id": "late", "num_samples": 1}
    fields = turn_fields(turn("ab", "C"))
    item = {
        "groups": head,
        "turns": {**head, "sample": 0, "turn": 0, **fields},
        "trajectories": {**head, "sample": 0, "turns": [fields], "reward": 1.0},
    }[route]

    response = small.post(route, item)

    problem = response.json()
    assert response.status_code == 429
    assert response.headers["Retry-After"] == "1"
    assert "2 groups are live, 2 are allowed" in problem["detail"]
    assert "out_of_capacity" in [reason["kind"] for reason in problem["reasons"]]


def test_admitted_groups_of_a_request_have_results(
    small: IngestClient, client: redis.Redis
) -> None:
    items = [{"group_id": f"g{number}", "num_samples": 1} for number in range(3)]

    (large,) = results_of(small.post("groups", {"group_id": "large", "num_samples": 5}))
    before = small.results("groups", *items)
    RunReader(client, small.run).frees_capacity(stepped=1)
    after = small.results("groups", *items)

    assert large["status"] == 422
    assert "max_samples=4" in large["problem"]["detail"]
    assert [each["status"] for each in before] == [201, 201, 429]
    assert before[2]["problem"]["retry_after_s"] == 1.0
    assert [each["status"] for each in after] == [201, 201, 201]


def test_closed_run_takes_no_new_group(ingest: IngestClient, client: redis.Redis) -> None:
    known, new = ({"group_id": name, "num_samples": 1} for name in ("known", "new"))
    ingest.results("groups", known)
    close_run(client, ingest.run, "enough")

    results = ingest.results("groups", known, new)

    assert [each["status"] for each in results] == [201, 409]
    assert results[1]["problem"]["type"].endswith("/end-of-run")


@pytest.mark.parametrize(("attempt", "most"), [(999, 3), (2, 1)])
@pytest.mark.parametrize("form", ["json", "arrow"])
def test_attempt_beyond_the_known_ones_is_422(
    ingest: IngestClient, reader: RunReader, attempt: int, most: int, form: str
) -> None:
    item = {"group_id": "g", "sample": 0, "attempt": attempt, "num_samples": 1024}
    fields = {**item, "turn": 0, **turn_fields(turn("p", "R"))}

    if form == "json":
        response = ingest.post("turns", fields)
    else:
        response = ingest.send("turns", arrow_body([fields]), content_type=ARROW)

    (result,) = results_of(response)
    assert result["status"] == 422
    assert result["problem"]["field"].endswith("0.attempt")
    assert f"is above {most}, " in result["problem"]["detail"]
    assert reader.ledger() == {}
