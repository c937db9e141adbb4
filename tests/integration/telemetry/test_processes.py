"""One turn through a gateway, a batcher and a trainer: its lines in the logs, and its spans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import httpx2
import pytest

from testkit import config
from testkit.requests.ingest import turn_fields
from testkit.services.observed_processes import Process, Processes
from testkit.services.otlp import Collector
from testkit.services.scrapes import Scrape
from testkit.turns import turn
from testkit.waiting import wait_until
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.models.spec import SmallModelSpec

pytestmark = [pytest.mark.redis, pytest.mark.grpc, pytest.mark.e2e, pytest.mark.slow]

POLICY = SmallModelSpec(vocab_size=128, hidden_size=16, num_layers=1)
CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Followed(NamedTuple):
    """Logs, metrics and spans of one step with one trajectory.

    Attributes:
        waits: reasons of the trainer while it was the only service.
        refused: status of its metrics without a key.
        ended: statuses of /readyz and /healthz of the batcher after the end of the store.
    """

    lines: dict[str, list[dict[str, Any]]]
    scrapes: dict[str, Scrape]
    collector: Collector
    waits: dict[str, str]
    refused: int
    ended: tuple[int, int]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    folder = tmp_path_factory.mktemp("followed")
    (folder / "policy.json").write_text(json.dumps(asdict(POLICY)))
    key_file = folder / "service.key"
    with EmbeddedServer() as server, Collector() as collector:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "TURNSTREAM_LOG_LEVEL": "DEBUG",
            "TURNSTREAM_KEY_FILE": str(key_file),
        }
        with Processes(server.url, folder, **variables) as services:
            trainer = services.start(
                *("trainer", "--run", "maze", "--policy", str(folder / "policy.json")),
                *("--folder", str(folder / "trainer"), "--threads", "1"),
            )
            wait_until(lambda: trainer.get("/healthz")[0] == 200, 60, describe="the trainer")
            waits, refused = trainer.reasons(), trainer.get("/metrics")[0]
            batcher, gateway = (services.start(kind) for kind in ("batcher", "gateway"))
            with connect(server.url) as client:
                create_run(client, "maze", config(1))
            processes = {"batcher": batcher, "gateway": gateway, "trainer": trainer}
            for each in processes.values():
                each.wait_until_ready()
            assert key_file.stat().st_mode & 0o077 == 0
            key = {"X-API-Key": key_file.read_text().strip()}
            _send_turn(gateway.address, key)
            wait_until(lambda: _has_trained(trainer, key), 60, describe="a trained step")
            scrapes = {kind: each.scrape(**key) for kind, each in processes.items()}
            for each in (gateway, trainer):
                each.stop()
            server.kill()
            wait_until(lambda: "store" in batcher.reasons(), describe="the end of the store")
            ended = batcher.get("/readyz")[0], batcher.get("/healthz")[0]
            batcher.stop()
            lines = {kind: each.lines() for kind, each in processes.items()}
        yield Followed(lines, scrapes, collector, waits, refused, ended)


def _send_turn(gateway: str, key: dict[str, str]) -> None:
    item = {"group_id": "g7", "sample": 0, "num_samples": 1, "seal": {"reward": 1.0}, "turn": 0}
    sent = httpx2.post(
        f"http://{gateway}/v1/runs/maze/turns",
        json={"items": [{**item, **turn_fields(turn("ab", "CD", logprobs=-0.5, version=0))}]},
        headers={
            **key,
            "X-Request-ID": "from-the-client",
            "traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01",
        },
        timeout=60,
    )
    assert sent.status_code == 200, sent.text


def _has_trained(trainer: Process, key: dict[str, str]) -> bool:
    return trainer.scrape(**key).value("turnstream_trainer_step", "maze") == 1


def test_one_question_finds_a_turn_in_all_logs(followed: Followed) -> None:
    """Takes more than 5 s: a run is trained by services that are processes, one with torch."""
    found = [
        (line["service"], line["message"].partition(" of run")[0])
        for lines in followed.lines.values()
        for line in lines
        if line.get("run") == "maze"
        and (line.get("trajectory") == "g7/0/0" or line.get("step") == 1)
    ]

    assert ("gateway", "stored") in found
    assert ("batcher", "sealed") in found
    assert ("batcher", "planned step 1") in found
    assert ("batcher", "planned") in found
    assert ("batcher", "share of a batch was sent to the trainer") in found
    assert ("trainer", "trained a step") in found
    for lines in followed.lines.values():
        assert all(
            {"time", "level", "service", "logger", "message"} <= line.keys() for line in lines
        )


def test_the_request_is_found_by_its_id(followed: Followed) -> None:
    of_request = [
        line["message"]
        for line in followed.lines["gateway"]
        if line.get("request_id") == "from-the-client"
    ]

    assert {"stored", "POST /v1/runs/{run}/turns"} <= {*of_request}


def test_every_service_shows_the_step(followed: Followed) -> None:
    batcher, gateway, trainer = (
        followed.scrapes[kind] for kind in ("batcher", "gateway", "trainer")
    )

    assert gateway.value("turnstream_gateway_ingested_turns_total", "stored") == 1
    assert batcher.value("turnstream_batcher_ingested_trajectories_total", "sealed", "maze") == 1
    assert batcher.value("turnstream_batcher_pull_seconds_count") >= 1
    assert batcher.value("turnstream_batcher_plan_seconds_count") == 1
    assert batcher.value("turnstream_batcher_calls_total", "Stepped", "OK") == 1
    assert batcher.value("turnstream_batcher_sent_bytes_total") > 0
    assert trainer.value("turnstream_trainer_trajectories_total", "maze") == 1
    assert trainer.value("turnstream_trainer_dependency_ready", "batcher") == 1


def test_spans_of_a_step_are_one_trace(followed: Followed) -> None:
    collector = followed.collector
    (plan,) = collector.named("plan")
    (step,) = collector.named("train step")
    gets = [span for span in collector.named("get") if span.attributes["turnstream.step"] == 1]
    (assembly,) = collector.named("assemble")

    assert (plan.service, step.service) == ("turnstream-batcher", "turnstream-trainer")
    assert {plan.trace_id, step.trace_id, *(get.trace_id for get in gets)} == {plan.trace_id}
    assert gets
    assert (assembly.trace_id, assembly.parent_id) == (plan.trace_id, plan.span_id)
    calls = {(span.trace_id, span.span_id) for span in collector.named("grpc Get")}
    assert {link for get in gets for link in get.links} <= calls
    assert all(len(get.links) == 1 for get in gets)


def test_the_trace_of_a_request_is_taken_over(followed: Followed) -> None:
    (request,) = followed.collector.named("POST /v1/runs/{run}/turns")

    assert (request.trace_id, request.parent_id) == (CLIENT_TRACE, CLIENT_SPAN)
    assert request.service == "turnstream-gateway"
    assert request.attributes["http.response.status_code"] == 200


def test_services_say_what_they_wait_for(followed: Followed) -> None:
    assert "no run named 'maze'" in followed.waits["run"]
    assert "no batcher is registered" in followed.waits["batcher"]
    assert "engine" in followed.waits
    assert "store" not in followed.waits
    assert (followed.refused, followed.ended) == (401, (503, 200))
