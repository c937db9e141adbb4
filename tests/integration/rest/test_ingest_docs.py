"""The page on ingest: its commands run, and its table has all columns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import redis

from testkit.gateway_thread import GatewayThread
from testkit.ingest import IngestClient, results_of
from testkit.stores import RunReader
from turnstream.batching.config import BatchingConfig
from turnstream.store.run.runs import create_run
from turnstream_server.gateway.bodies import MAX_JSON_BYTES
from turnstream_server.gateway.rest.bodies import MAX_TURNS, MAX_WRITES
from turnstream_server.gateway.rest.ingest.arrow_columns import GROUP_COLUMNS, TURN_COLUMNS
from turnstream_server.gateway.rest.ingest.publishers import (
    MAX_PUBLISHERS,
    MAX_TOKEN_BYTES,
    MAX_TRAJECTORIES,
)
from turnstream_server.gateway.rest.ingest.routes import MAX_KEYS

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
