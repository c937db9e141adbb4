"""Trajectories by the SDK and by each ingest route are the same, and the page on ingest is true."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis

from testkit.requests.ingest import (
    ARROW,
    IngestClient,
    arrow_body,
    arrow_rows,
    arrow_turns,
    results_of,
    trajectory_items,
    turn_items,
)
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from testkit.turns import trajectory, turn
from turnstream.batching.config import BatchingConfig
from turnstream.generator import Publisher
from turnstream.store.run.runs import create_run
from turnstream.types import DeclaredColumn, Group, Status, TrajectoryKey, VersionRun
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.bodies import MAX_JSON_BYTES
from turnstream_server.gateway.rest.bodies import MAX_TURNS, MAX_WRITES
from turnstream_server.gateway.rest.ingest.arrow_columns import GROUP_COLUMNS, TURN_COLUMNS
from turnstream_server.gateway.rest.ingest.publishers import (
    MAX_PUBLISHERS,
    MAX_TOKEN_BYTES,
    MAX_TRAJECTORIES,
)
from turnstream_server.gateway.rest.ingest.routes import MAX_KEYS

_COLUMN = DeclaredColumn(name="state", per="token", dtype="float32", shape=(2, 3))


def _state(num_tokens: int) -> dict[str, np.ndarray]:
    return {"state": np.arange(num_tokens * 6, dtype=np.float32).reshape(num_tokens, 2, 3)}


def _full_group(group_id: str) -> Group:
    """A group with every field: turns that continue and branch, and each kind of value."""
    first = turn("ab", "CDe", logprobs=-0.25, rewards=0.5, version=3, extras=_state(5))
    second = turn("abcdef", "Gh", logprobs=-1e-7, weights=0.3, anchor="room", extras=_state(8))
    runs = (VersionRun(3, 1), VersionRun(None, 1))
    branch = replace(turn("abx", "Yz", extras=_state(5)), version_runs=runs)
    again = replace(turn("ab", "XY", version=9, extras=_state(4)), call_id="call 7")
    rich = replace(
        trajectory(first, again, second, branch, reward=0.75, status=Status.TRUNCATED),
        siblings="mask",
        reward_components={"format": 0.25, "answer": 1.0},
        sampling={"temperature": 0.7},
        tags={"task": "maze"},
        metrics={"steps": 3.0},
    )
    waiting = trajectory(turn("q", "R", extras=_state(2)), sample=1, reward=None)
    return Group(
        group_id=group_id,
        trajectories=[rich, replace(waiting, awaits_reward=True)],
        prompt_uid="prompt/7",
    )


def _send(ingest: IngestClient, route: str, groups: list[Group]) -> None:
    path, _, is_arrow = route.partition(" ")
    if is_arrow:
        rows_of = arrow_turns if path == "turns" else arrow_rows
        rows = [row for group in groups for row in rows_of(group)]
        response = ingest.send(path, arrow_body(rows), content_type=ARROW)
    else:
        items_of = turn_items if path == "turns" else trajectory_items
        response = ingest.post(path, *(item for group in groups for item in items_of(group)))
    assert {result["status"] for result in results_of(response)} == {201}


@pytest.mark.parametrize("route", ["turns", "trajectories", "turns arrow", "trajectories arrow"])
def test_ingest_stores_what_the_sdk_stores(
    route: str,
    server: EmbeddedServer,
    client: redis.Redis,
    gateway: GatewayThread,
    new_run: Callable[..., str],
) -> None:
    runs = [new_run(client, extra_columns=(_COLUMN,)) for _ in range(2)]
    groups = [_full_group("g0"), _full_group("g/1")]
    with Publisher(server.url, runs[0], writer="test") as publisher:
        for group in groups:
            publisher.publish(group).result()

    with IngestClient(gateway, runs[1]) as ingest:
        for _ in range(2):  # the second request changes nothing
            _send(ingest, route, groups)

    native, rest = (RunReader(client, run) for run in runs)
    assert rest.ledger() == native.ledger()
    counts = {"accepted": 4, "sealed": 2, "awaiting_reward": 2}
    assert rest.counts() == native.counts() == counts
    assert _by_name(rest.events()) == _by_name(native.events())
    for group in groups:
        for member in group.trajectories:
            key = TrajectoryKey(group.group_id, member.sample)
            assert rest.records(key) == native.records(key)


def _by_name(events: list[object]) -> list[str]:
    return sorted(map(repr, events))


# ------------------------------------------------------------------------------ the page on ingest

_PAGE = Path(__file__).parents[3] / "docs/http.md"
_INGEST = _PAGE.read_text(encoding="utf-8").split("## REST: ingest\n")[1]
_TEXT = re.split(r"^## ", _INGEST, flags=re.MULTILINE)[0]


def test_commands_of_the_page_store_a_trajectory(
    gateway: GatewayThread, client: redis.Redis
) -> None:
    create_run(client, "demo", BatchingConfig(batch_groups=2, mini_batch_groups=2))
    commands = re.findall(r"curl --json '(.*?)' http://127.0.0.1:7601/v1/(\S+)", _TEXT, re.DOTALL)

    with IngestClient(gateway, "demo") as ingest:
        answers = [ingest.http.post(path, json=json.loads(body)) for body, path in commands]

    assert [each["status"] for answer in answers for each in results_of(answer)] == [201, 201]
    assert RunReader(client, "demo").states() == {"task-7/0/0": "sealed", "task-7/1/0": "open"}


def test_table_of_the_page_has_all_arrow_columns() -> None:
    table = _TEXT.split("### Arrow\n")[1].split("### ")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}

    assert names == {*TURN_COLUMNS, *GROUP_COLUMNS}


def test_limits_of_the_page_are_those_of_the_code() -> None:
    counts = (MAX_WRITES, MAX_TURNS, MAX_KEYS, MAX_TRAJECTORIES, MAX_PUBLISHERS)
    sizes = (f"{MAX_TOKEN_BYTES >> 20} MB", f"JSON at most {MAX_JSON_BYTES >> 20} MB")

    assert [each for each in (*[f"{n:,}" for n in counts], *sizes) if each not in _TEXT] == []
