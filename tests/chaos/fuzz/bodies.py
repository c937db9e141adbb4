"""Damaged bodies of HTTP requests to the REST API, plain and compressed."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import zstandard

import turnstream
from fuzz.damage import damaged, damaged_message
from testkit.requests.ingest import (
    ARROW,
    arrow_body,
    arrow_rows,
    arrow_turns,
    trajectory_items,
    turn_items,
)
from testkit.turns import group, trajectory, turn
from turnstream.generator.transport.http_transport import HttpTransport
from turnstream.generator.transport.messages import MEDIA_TYPE as CALLS

RUN = "fuzz"
JSON = "application/json"

WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0.5, 2**31, 2**63, 10**400, float("nan"), 1e308),
    *("", "\ud800", "a\0b", "x" * 5_000, [], [[]], {}, {"": None}),
)
"""Values in place of one value in JSON; the second text is half a surrogate pair."""

_COLUMNS: tuple[tuple[Any, pa.DataType], ...] = (
    *((None, pa.null()), ("", pa.string()), ("x" * 5_000, pa.large_string()), (-1, pa.int64())),
    *((2**64 - 1, pa.uint64()), (float("nan"), pa.float64()), (b"\xff", pa.binary())),
    *(([], pa.list_(pa.float64())), ([None], pa.list_(pa.int32())), ([-1], pa.list_(pa.int8()))),
    *(([[1]], pa.list_(pa.list_(pa.int32()))), ({"a": 1}, pa.struct({"a": pa.int8()}))),
)


class Body(NamedTuple):
    """A body and its route below `/v1`."""

    route: str
    media_type: str
    content: bytes
    encoding: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of a request with this body."""
        encoding = {"content-encoding": self.encoding} if self.encoding else {}
        return {"content-type": self.media_type, **encoding}


def json_bodies() -> list[Body]:
    sent = _group()
    named = {"group_id": "task", "sample": 0}
    contents = {
        "groups": {"items": [{"group_id": "task", "num_samples": 2, "prompt_uid": "p"}]},
        "turns": {"items": turn_items(sent)},
        "trajectories": {"items": trajectory_items(sent)},
        "rewards": {"items": [{**named, "reward": 1.0, "reward_components": {"a": 1.0}}]},
        "prompts": {"prompts": [{"prompt_uid": "p", "text": "What?", "num_samples": 2}]},
        "tasks": {"wait_s": 0},
        "tasks/end": {"group_id": "task", "trajectories": [{"sample": 0}], "reason": "left"},
    }
    return [
        Body(f"runs/{RUN}/{route}", JSON, json.dumps(content).encode())
        for route, content in contents.items()
    ]


def arrow_bodies() -> list[Body]:
    sent = _group()
    rows = {
        "groups": [{"group_id": "task", "num_samples": 2, "samples": [1]}],
        "turns": arrow_turns(sent),
        "trajectories": arrow_rows(sent),
    }
    return [Body(f"runs/{RUN}/{route}", ARROW, arrow_body(each)) for route, each in rows.items()]


def call_bodies(url: str) -> list[Body]:
    """Create the run through a gateway, and return the bodies of a publisher for a group."""
    found: list[bytes] = []
    send = HttpTransport.send

    def recording(self: HttpTransport, calls: Any, **options: Any) -> Any:
        found.append(calls.SerializeToString())
        return send(self, calls, **options)

    with pytest.MonkeyPatch.context() as patch, turnstream.connect(url) as service:
        patch.setattr(HttpTransport, "send", recording)
        run = service.create_run(RUN, batch_groups=100, mini_batch_groups=100)
        with run.publisher() as publisher:
            publisher.publish(_group()).result(60)
    assert found, "the SDK has sent no calls"
    return [Body("calls", CALLS, content) for content in dict.fromkeys(found)]


def _group() -> Any:
    turns = [turn("ab", "CD", logprobs=-0.5, version=0), turn("abCDe", "F", logprobs=-1.0)]
    members = [trajectory(*turns, sample=sample, reward=float(sample)) for sample in range(2)]
    return group("g", *members)


def damaged_body(body: Body, rng: random.Random) -> Body:
    """Return a damaged body: its content, or what compression makes of it, or both."""
    content = body.content
    if body.media_type == JSON and rng.random() < 0.7:
        content = damaged_json(content, rng)
    elif body.media_type == ARROW and rng.random() < 0.5:
        content = damaged_arrow(content, rng)
    elif body.media_type == CALLS and rng.random() < 0.7:
        content = damaged_message(content, rng)
    elif rng.random() < 0.8:
        content = damaged(content, rng)
    encoding = rng.choice(("", "", "gzip", "zstd"))
    if encoding == "gzip":
        content = gzip.compress(content)
    elif encoding == "zstd":
        content = zstandard.compress(content)
    if encoding and rng.random() < 0.3:
        content = damaged(content, rng)
    if rng.random() < 0.05:
        encoding = rng.choice(("gzip", "zstd", "br", "gzip, zstd", "x" * 300))
    return body._replace(content=content, encoding=encoding)


def damaged_json(data: bytes, rng: random.Random) -> bytes:
    content = json.loads(data)
    holder, name = rng.choice([*_places(content)])
    if rng.random() < 0.15:
        del holder[name]
    else:
        holder[name] = rng.choice(WRONG_VALUES)
    return json.dumps(content).encode()


def damaged_arrow(data: bytes, rng: random.Random) -> bytes:
    with pa.ipc.open_stream(data) as reader:
        table = reader.read_all()
    place = rng.randrange(table.num_columns)
    name = table.column_names[place]
    table = table.remove_column(place)
    if rng.random() < 0.8:
        value, kind = rng.choice(_COLUMNS)
        table = table.append_column(name, pa.array([value] * table.num_rows, kind))
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each list or object inside with each of its indices or names."""
    items = enumerate(value) if isinstance(value, list) else value.items()
    for name, inner in items:
        yield value, name
        if isinstance(inner, list | dict):
            yield from _places(inner)
