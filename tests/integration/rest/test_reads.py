"""Ledger, batches, versions and reasons over HTTP, of a run with a real batcher and a trainer."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import turnstream
from testkit import ids, wait_until
from testkit.requests.ingest import ARROW
from testkit.requests.rest_api import RestApi, content_of
from testkit.services.batchers import BatcherThread
from testkit.services.gateway_thread import GatewayThread
from turnstream.store.client.connection import connect
from turnstream.store.run.tasks import Prompt
from turnstream_server.batcher.assembly import assembler
from turnstream_server.batcher.assembly.assembler import read_share
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.console.batches import read_batch, write_batch
from turnstream_server.console.ledger import read_run_ledger, read_trajectory
from turnstream_server.console.results import read_metrics
from turnstream_server.console.runs import read_reasons, read_run, read_runs, read_status
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.queries import run_facts

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def own_store() -> Iterator[EmbeddedServer]:
    """A store of its own: the batcher serves every run of it."""
    upkeep = Upkeep(snapshot_events=1, snapshot_steps=1)  # steps are released at once
    with EmbeddedServer() as server, BatcherThread(server.url, upkeep=upkeep):
        yield server


@pytest.fixture(scope="module")
def gateway(own_store: EmbeddedServer) -> Iterator[GatewayThread]:
    read = functools.partial(read_share, own_store.url)
    with GatewayThread(own_store.url, read_share=read) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def api(gateway: GatewayThread) -> Iterator[RestApi]:
    with RestApi(gateway, writer="test") as api:
        yield api


@pytest.fixture(scope="module")
def service(own_store: EmbeddedServer) -> Iterator[turnstream.Service]:
    with turnstream.connect(own_store.url) as service:
        yield service


@pytest.fixture
def new_run(service: turnstream.Service) -> Callable[..., turnstream.Run]:
    def make(**settings: Any) -> turnstream.Run:
        return service.create_run(f"reads-{next(_numbers)}", **{"batch_groups": 2, **settings})

    return make


def write(
    run: turnstream.Run, *group_ids: str, num_samples: int = 2, reward: float | None = None
) -> None:
    """Write groups whose trajectories have two turns and different rewards, or this one."""
    with run.publisher("writer") as publisher:
        for group_id in group_ids:
            with publisher.group(group_id, num_samples=num_samples) as group:
                for sample, trajectory in enumerate(group):
                    trajectory.append(ids("ab"), ids("CD"), policy_version=0)
                    trajectory.append(ids("abCDe"), ids("FG"), policy_version=0)
                    trajectory.seal(reward=float(sample) if reward is None else reward)


def train(run: turnstream.Run, *, num_steps: int, commits: bool = False) -> None:
    """Take steps of a run, and acknowledge them."""
    with run.batches() as batches:
        for step in itertools.islice(batches, num_steps):
            assert len([*step]) == step.num_mini_batches
            step.done()
            if commits:
                step.commit()


@pytest.fixture(scope="module")
def trained(service: turnstream.Service) -> turnstream.Run:
    """A run with a stepped batch of two mini-batches, a planned batch, and an abandoned sample."""
    run = service.create_run(f"reads-{next(_numbers)}", batch_groups=2, mini_batch_groups=1)
    write(run, "a", "b")
    train(run, num_steps=1)
    write(run, "c", "d/1")
    with run.publisher("writer") as publisher, publisher.group("e", num_samples=2) as group:
        for trajectory in group:
            trajectory.abandon("no engine")

    def is_settled() -> bool:
        found = read_run_ledger(service.url, run.name)
        return found["planned"] == 2 and not found["states"]["abandoned"]["held_bytes"]

    wait_until(is_settled)
    return run


def test_reads_are_those_of_the_command_line(
    api: RestApi, own_store: EmbeddedServer, trained: turnstream.Run
) -> None:
    url, run = own_store.url, trained.name

    def ledger(content: dict[str, Any]) -> dict[str, Any]:
        content["budget"].pop("used")
        return content

    assert api.get(f"runs/{run}") == read_run(url, run)
    assert api.get("runs")["runs"] == read_runs(url)
    assert ledger(api.get(f"runs/{run}/ledger")) == ledger(read_run_ledger(url, run))
    batch = api.get(f"runs/{run}/batches/1")
    assert {name: value for name, value in batch.items() if value is not None} == {
        name: value for name, value in read_batch(url, run, 1).items() if value is not None
    }
    for path, name in (("a/1", "a/1/0"), ("d%2F1/0", "d/1/0/0"), ("e/0?attempt=0", "e/0/0")):
        found = read_trajectory(url, run, name)
        assert api.get(f"runs/{run}/trajectories/{path}") == {**found, "events": [*found["events"]]}


def test_ledger_adds_up_and_names_reasons(api: RestApi, trained: turnstream.Run) -> None:
    path = f"runs/{trained.name}/ledger"

    ledger = api.get(path)

    states = ledger["states"]
    counts = {name: facts["count"] for name, facts in states.items()}
    assert counts == {"stepped": 4, "planned": 4, "abandoned": 2}
    assert sum(counts.values()) == ledger["accepted"]
    assert states["abandoned"]["reasons"] == {"no engine": 2}
    for state in states:
        assert api.get(path, state=state)["states"] == {state: states[state]}
    assert api.get(path, state="dead")["states"] == {}
    assert api.refused("GET", f"{path}?state=lost", 422)["field"] == "query.state"


def test_query_parameter_that_no_route_reads_is_refused(
    api: RestApi, trained: turnstream.Run
) -> None:
    for path, names in [
        ("ledger?stat=sealed", "known: state"),
        ("batches?from=1", "known: "),
        ("waits?kind=no_planner", "this route has none"),
    ]:
        problem = api.refused("GET", f"runs/{trained.name}/{path}", 422)
        name = path.partition("?")[2].partition("=")[0]
        assert problem["field"] == f"query.{name}"
        assert f"it is no query parameter of this route; {names}" in problem["detail"]


def test_trajectory_has_its_events_in_order(api: RestApi, trained: turnstream.Run) -> None:
    found = api.get(f"runs/{trained.name}/trajectories/a/1")

    assert (found["state"], found["step"], found["reward"]) == ("stepped", 1, 1.0)
    names = [event["name"] for event in found["events"]]
    assert names == ["group opened", "sealed", "planned", "stepped"]
    times = [event["at_ms"] for event in found["events"]]
    assert times == sorted(times)
    api.refused("GET", f"runs/{trained.name}/trajectories/a/2", 404)


def test_batches_are_listed_in_pages(
    api: RestApi, trained: turnstream.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"runs/{trained.name}/batches"

    first, second = api.get(path, limit=1), api.get(path, from_step=2, limit=1)

    batches = first["batches"] + second["batches"]
    assert [(each["step"], each["state"]) for each in batches] == [(1, "stepped"), (2, "planned")]
    assert (first["next_step"], second["next_step"]) == (2, None)
    assert batches[1]["previous_hash"] == batches[0]["manifest_hash"]
    assert batches[0]["num_mini_batches"] == 2
    assert api.get(path)["batches"] == batches
    assert api.get(path, from_step=3) == {"batches": [], "next_step": None}
    monkeypatch.setattr(run_facts, "MAX_PAGE_BYTES", 1)  # plans of many bytes end a page early
    assert [api.get(path), api.get(path, from_step=2)] == [first, second]


def test_mini_batch_has_the_bytes_that_a_batcher_sends(
    api: RestApi, own_store: EmbeddedServer, trained: turnstream.Run, tmp_path: Path
) -> None:
    path = f"runs/{trained.name}/batches/1"

    for rank in range(2):
        ranks = {"dp_rank": rank, "dp_world_size": 2}
        out = write_batch(own_store.url, trained.name, 1, tmp_path / f"{rank}.arrow", **ranks)
        for index, file in enumerate(out):
            response = api.http.get(f"{path}/{index}", params=ranks)
            assert response.headers["content-type"] == ARROW
            assert response.content == file.read_bytes()
    with pa.ipc.open_stream(api.http.get(f"{path}/0").content) as reader:
        assert reader.read_all().num_rows == 2


def test_missing_or_large_batch_is_refused(
    api: RestApi, trained: turnstream.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = {
        "2/2": 404,
        "9/0": 404,
        "9": 404,
        "0": 422,
        "x": 422,
        "1/0?dp_rank=2&dp_world_size=2": 422,
        "1/0?dp_world_size=0": 422,
    }
    for path, status in statuses.items():
        api.refused("GET", f"runs/{trained.name}/batches/{path}", status)
    monkeypatch.setattr(assembler, "MAX_SHARE_BYTES", 1)
    api.refused("GET", f"runs/{trained.name}/batches/1/0", 422)


def test_released_batch_has_names_and_its_reward(
    api: RestApi, own_store: EmbeddedServer, new_run: Callable[..., turnstream.Run]
) -> None:
    run = new_run(batch_groups=1, retain_checkpoints=1)
    write(run, "a", "b")
    train(run, num_steps=2, commits=True)
    path = f"runs/{run.name}/batches"
    wait_until(lambda: 1 not in [each["step"] for each in api.get(path)["batches"]])

    content = api.get(f"{path}/1")

    assert (content["state"], content["mini_batches"]) == ("committed", [])
    assert content["mean_reward"] == 0.5
    assert [each["id"] for each in content["trajectories"]] == ["a/0/0", "a/1/0"]
    problem = api.refused("GET", f"{path}/1/0", 410)
    assert "no longer retained" in problem["detail"]
    write(run, "c", reward=1.0)
    wait_until(lambda: read_run_ledger(own_store.url, run.name)["planned"] == 3)
    found = read_metrics(run.name, redis_url=own_store.url)
    assert found.source == f"the batches of run {run.name}"
    rewards = [(each["step"], each["reward_mean"]) for each in found.steps]
    assert rewards == [(1, 0.5), (2, 0.5), (3, 1.0)]


def test_reasons_are_those_of_the_command_line(
    api: RestApi, own_store: EmbeddedServer, new_run: Callable[..., turnstream.Run]
) -> None:
    run = new_run()
    run.pause("judge is down")

    def expected_kinds() -> list[str]:
        return [each["kind"] for each in read_reasons(own_store.url, run.name)["reasons"]]

    wait_until(lambda: "batcher_away" not in expected_kinds(), describe="the planner of the run")
    content = api.get(f"runs/{run.name}/waits")

    assert [each["kind"] for each in content["reasons"]] == expected_kinds()
    assert content["reasons"][0]["kind"] == "run_paused"
    [status] = read_status(own_store.url, run.name)
    assert status["reason"] == content["reasons"][0]
    assert "judge is down" in content["reasons"][0]["sentence"]


def test_version_is_announced_once_and_awaited(
    api: RestApi, gateway: GatewayThread, new_run: Callable[..., turnstream.Run]
) -> None:
    run = new_run()
    path = f"runs/{run.name}/versions"
    empty = api.get(path)
    assert (empty["newest"], empty["versions"]) == (None, [])
    assert empty["reasons"][0]["kind"] == "not_ready"

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(api.get, path, above=3, wait_s=50)
        wait_until(lambda: gateway.num_requests == 1)
        api.post(path, version=3, weights_uri="file:///w/3")
        api.post(path, version=4, weights_uri="http://trainer/4")
        content = held.result(20)

    assert [each["version"] for each in content["versions"]] == [4]
    assert run.wait_for_version(above=3, timeout_s=1).weights_uri == "http://trainer/4"
    assert api.post(path, version=4, weights_uri="http://trainer/4") == content["newest"]
    api.refused("POST", path, 409, version=4, weights_uri="http://other/4")
    api.refused("POST", path, 409, version=2)
    assert [each["version"] for each in api.get(path)["versions"]] == [4, 3]
    assert api.get(path, above=4, wait_s=0.1)["versions"] == []


def test_version_of_an_ended_session_is_refused(
    api: RestApi, new_run: Callable[..., turnstream.Run]
) -> None:
    run = new_run(batch_groups=1)
    write(run, "a")
    train(run, num_steps=1)
    path = f"runs/{run.name}/versions"

    problem = api.refused("POST", path, 409, version=1, session_epoch=0)
    assert problem["type"].endswith("/fenced")
    announced = api.post(path, version=1, session_epoch=1)
    assert (announced["step"], announced["lineage"]) == (1, "main")


def test_prompts_that_are_done_are_an_error_of_their_own(
    api: RestApi, new_run: Callable[..., turnstream.Run]
) -> None:
    run = new_run(batch_groups=1)
    run.add_prompts([Prompt(prompt_uid="p", payload=b"", num_samples=1)])
    task = api.post(f"runs/{run.name}/tasks")
    turn = {"turn": 0, "prompt_ids": [1], "response_ids": [2], "seal": {"reward": 1.0}}
    api.post(f"runs/{run.name}/turns", items=[{"group_id": task["group_id"], "sample": 0, **turn}])
    wait_until(lambda: api.get(f"runs/{run.name}")["steps"]["planned"] == 1)

    problem = api.refused("POST", f"runs/{run.name}/tasks", 409)
    assert problem["type"].endswith("/prompts-exhausted")


def test_abandoned_sample_is_taken_as_a_refill(
    api: RestApi, gateway: GatewayThread, new_run: Callable[..., turnstream.Run]
) -> None:
    run = new_run(batch_groups=1, deadline_policy="refill", max_refills=1)
    write_turn = {"turn": 0, "prompt_ids": [1], "response_ids": [2], "seal": {"reward": 1.0}}

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(api.post, f"runs/{run.name}/refills", wait_s=50)
        wait_until(lambda: gateway.num_requests == 1)
        with run.publisher("other") as publisher, publisher.group("g", num_samples=2) as group:
            first, second = group
            first.append(ids("ab"), ids("CD"))
            first.seal(reward=0.0)
            second.abandon("engine died")
        refill = held.result(30)

    assert (refill["group_id"], refill["sample"], refill["attempt"]) == ("g", 1, 1)
    item = {"group_id": "g", "sample": 1, "attempt": 1, **write_turn}
    (result,) = api.post(f"runs/{run.name}/turns", items=[item])["results"]
    assert result["state"] == "sealed"
    wait_until(lambda: api.get(f"runs/{run.name}")["steps"]["planned"] == 1)


def test_damaged_record_of_the_store_is_no_error_of_the_request(
    api: RestApi, own_store: EmbeddedServer, new_run: Callable[..., turnstream.Run]
) -> None:
    run = new_run()
    with connect(own_store.url) as client:
        client.hset(f"ts:{{{run.name}}}:ledger", "g/0/0", "nonsense")

    problem = api.refused("GET", f"runs/{run.name}/ledger", 409)

    assert "damaged" in problem["detail"]
    assert "g/0/0" in problem["detail"]
    content_of(api.http.delete(f"runs/{run.name}"))
