"""Bodies of the ingest routes: wrong fields, Arrow columns, compression and limits."""

from __future__ import annotations

import gzip
import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
import redis
import zstandard
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st

from testkit.requests.ingest import (
    ARROW,
    ARROW_TYPES,
    IngestClient,
    arrow_body,
    arrow_rows,
    results_of,
    trajectory_items,
    turn_fields,
)
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from testkit.turns import group, turn
from turnstream.errors import RecordError
from turnstream.generator.encode.checks import MAX_RECORD_BYTES
from turnstream.types import TrajectoryKey
from turnstream_server.gateway.rest.bodies import decompress

_TURN: dict[str, Any] = {
    "group_id": "g",
    "sample": 0,
    "num_samples": 2,
    "turn": 0,
    "prompt_ids": [1, 2],
    "response_ids": [3, 4],
}


WRONG_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": [-0.5]}, "logprobs", "has 1 values, response_ids has 2"),
    ({"logprobs": [-0.5, None]}, "logprobs", "are numbers"),
    ({"logprobs": [[-0.5], [-0.5]]}, "logprobs", "has the shape (2, 1)"),
    ({"prompt_ids": [1, 2.5]}, "prompt_ids", "are whole numbers, not float64"),
    ({"prompt_ids": [1, "2"]}, "prompt_ids", "are whole numbers"),
    ({"prompt_ids": [1, 10**400]}, "prompt_ids", "are whole numbers"),
    ({"prompt_ids": None}, "prompt_ids", "is missing"),
    ({"turn": None}, "turn", "is missing"),
    ({"turn": -1}, "turn", "greater than or equal to 0, got -1"),
    ({"response_ids": {"a": 1}}, "response_ids", "not one dimension"),
    ({"loss_mask": [1, 2]}, "loss_mask", "2 at position 1 is neither 0 nor 1"),
    ({"token_weights": [1, -1]}, "token_weights", "-1.0 at position 1"),
    ({"rewards": [1.0]}, "rewards", "has 1 values"),
    ({"reward": True}, "reward", "expected a valid number, got True"),
    ({"policy_version": "3"}, "policy_version", "expected a valid integer, got '3'"),
    ({"version_runs": [{"version": 1, "num_tokens": 1}]}, "version_runs", "cover 1 tokens"),
    ({"version_runs": [{"version": 1}]}, "version_runs.0.num_tokens", "field required"),
    ({"sample": 2}, "sample", "2 in a group of 2"),
    ({"sample": "0"}, "sample", "expected a valid integer, got '0'"),
    ({"attempt": 1000}, "attempt", "1000 is not a whole number from 0 to 999"),
    ({"group_id": ""}, "group_id", "a name of 0 characters"),
    ({"num_samples": 0}, "num_samples", "greater than or equal to 1"),
    ({"num_needed": 3}, "num_needed", "3 of 2 samples"),
    ({"purpose": "test"}, "purpose", "'test' is not one of train, eval"),
    ({"colour": "red"}, "colour", "unknown field, got 'red'"),
    ({"seal": {"status": "done"}}, "seal.status", "'done' is not one of completed"),
    ({"seal": {"tags": {"a": 1}}}, "seal.tags['a']", "1 is not a text"),
    ({"seal": {"metrics": {"a": 1e40}}}, "seal.metrics['a']", "1e+40 is beyond"),
    ({"seal": {"reward": 1.0, "awaits_reward": True}}, "seal.reward", "awaits_reward"),
    ({"seal": {}, "abandon": {"reason": ""}}, "abandon", "so is seal"),
    ({"abandon": {}}, "abandon.reason", "field required"),
]


def test_wrong_field_is_named_with_its_item(ingest: IngestClient, reader: RunReader) -> None:
    for changed, field, words in WRONG_FIELDS:
        response = ingest.post("turns", {**_TURN, "sample": 1}, {**_TURN, **changed})

        problem = response.json()
        assert response.headers["content-type"] == "application/problem+json"
        assert (response.status_code, problem["field"]) == (422, f"items.1.{field}"), changed
        assert problem["detail"].startswith(f"items.1.{field}: ")
        assert words in problem["detail"]
    assert reader.ledger() == {}  # nothing of the requests is written


def test_wrong_turn_of_a_trajectory_is_named(ingest: IngestClient) -> None:
    (item, _) = trajectory_items(group())
    item["turns"].append({**item["turns"][0], "logprobs": [0.5, 0.5]})

    response = ingest.post("trajectories", item)

    assert (response.status_code, response.json()["field"]) == (422, "items.0.turns.1.logprobs")


def test_problem_of_one_item_leaves_the_others(ingest: IngestClient) -> None:
    large = {**_TURN, "sample": 1, "prompt_ids": [1] * (MAX_RECORD_BYTES // 4)}

    results = ingest.results("turns", large, {**_TURN, "extras": {"image": [1, 2]}}, _TURN)

    assert [each["status"] for each in results] == [422, 422, 201]
    assert f"bytes, more than {MAX_RECORD_BYTES}" in results[0]["problem"]["detail"]
    assert results[1]["problem"]["field"] == "items.1.extras['image']"


def test_body_of_another_form_is_refused(ingest: IngestClient) -> None:
    bodies = {
        **dict.fromkeys((b"", b"{", b"\xff", b"[" * 100_000), 400),
        **dict.fromkeys((b"[]", b"{}", b'{"items": {}}', b'{"items": [1]}'), 422),
        b'{"items": [' + b",".join([b"{}"] * 2049) + b"]}": 422,
    }
    for route in ("groups", "turns", "trajectories"):
        found = {body: ingest.send(route, body).status_code for body in bodies}
        assert found == bodies, route
    for headers, words in (
        ({"content_type": "text/plain"}, "Type is 'text/plain', expected application/json"),
        ({"content_encoding": "br"}, "Content-Encoding is 'br', expected one of gzip, zstd"),
    ):
        response = ingest.send("turns", b"{}", **headers)
        assert response.status_code == 415
        assert words in response.json()["detail"]


def _zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("zstd", _zstd)])
def test_compressed_bodies_are_read(
    ingest: IngestClient, reader: RunReader, encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    in_json = compress(json.dumps({"items": trajectory_items(group("j"))}).encode())
    in_arrow = compress(arrow_body(arrow_rows(group("a"))))

    responses = [
        ingest.send("trajectories", in_json, content_encoding=encoding),
        ingest.send("trajectories", in_arrow, content_encoding=encoding, content_type=ARROW),
        ingest.send("trajectories", in_json[:-9], content_encoding=encoding),
    ]

    assert [each.status_code for each in responses] == [200, 200, 400]
    assert set(reader.states()) == {"j/0/0", "j/1/0", "a/0/0", "a/1/0"}


@given(sizes=st.lists(st.integers(0, 400_000), min_size=1, max_size=4), cut=st.integers(0, 40))
def test_gzip_members_of_any_size_are_unpacked(sizes: list[int], cut: int) -> None:
    # A member whose end lay behind 64 kB of content, and that another one followed, had no end.
    contents = [bytes([number]) * size for number, size in enumerate(sizes)]
    body = b"".join(map(gzip.compress, contents))

    assert decompress(body, encoding="gzip", limit=2_000_000) == b"".join(contents)
    with pytest.raises(RecordError):
        decompress(body + b"no member"[: 1 + cut % 9], encoding="gzip", limit=2_000_000)


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("zstd", _zstd)])
def test_zip_bomb_is_413_and_takes_no_memory(
    new_gateway: Callable[..., GatewayThread], encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    bomb = compress(bytes(256 << 20))
    limit = 1 << 20
    with IngestClient(new_gateway(max_body_bytes=limit), "any") as ingest:
        response = ingest.send("turns", bomb, content_encoding=encoding)

    tracemalloc.start()
    with pytest.raises(HTTPException, match=str(limit)):
        decompress(bomb, encoding=encoding, limit=limit)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert response.status_code == 413
    assert peak_bytes < 8 * limit


def test_large_body_is_413(
    new_gateway: Callable[..., GatewayThread], client: redis.Redis, new_run: Callable[..., str]
) -> None:
    with IngestClient(new_gateway(max_body_bytes=2000), new_run(client)) as ingest:
        small = ingest.send("turns", b'{"items": []}' + b" " * 1900)
        large = ingest.send("turns", b'{"items": []}' + b" " * 2000)

    assert (small.status_code, large.status_code) == (200, 413)


_ROW: dict[str, Any] = {
    "group_id": "g",
    "sample": 0,
    "num_samples": 1,
    "prompt_ids": [1, 2],
    "response_ids": [3, 4],
}


_GROUP: dict[str, Any] = {"group_id": "g", "num_samples": 2}
WRONG_COLUMNS: list[tuple[str, dict[str, Any], dict[str, pa.DataType], str]] = [
    ("colour", {"colour": "red"}, {"colour": pa.string()}, "is unknown"),
    ("sample", {"sample": "0"}, {"sample": pa.string()}, "string, expected an integer"),
    (
        *("prompt_ids", {"prompt_ids": [1.0]}, {"prompt_ids": pa.list_(pa.float32())}),
        "expected list of integers",
    ),
    ("prompt_ids", {"prompt_ids": [1, None]}, {}, "has a null inside a list"),
    ("tags", {"tags": {"a": "b"}}, {"tags": pa.struct({"a": pa.string()})}, "expected map<string"),
]
"""Columns of one row of whole trajectories, and their types."""

WRONG_ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    ("trajectories", {"group_id": None}, "group_id", "is null"),
    ("trajectories", {"response_ids": None}, "response_ids", "is null"),
    ("trajectories", {"prompt_ids": [-5]}, "prompt_ids", "-5 at position 0"),
    ("trajectories", {"sample": 7}, "sample", "7 in a group of 1"),
    ("trajectories", {"status": "done"}, "status", "'done' is not one of"),
    ("trajectories", {"tags": [("a", "b"), ("a", "c")]}, "tags", "has a name twice"),
    ("turns", {"turn": None}, "turn", "is null"),
    ("turns", {"turn": -1}, "turn", "expected at least 0, got -1"),
    ("turns", {"reward": 1.0}, "seal", "is not true, and the row has reward"),
    ("groups", {"num_samples": None}, "num_samples", "is null"),
    ("groups", {"num_samples": 0}, "num_samples", "0"),
    ("groups", {"samples": [0, 2]}, "sample", "2"),
    ("groups", {"purpose": "fun"}, "purpose", "'fun' is not one of"),
]
"""Values of the second row of a body."""


def test_wrong_arrow_column_is_named(ingest: IngestClient, reader: RunReader) -> None:
    missing = {name: value for name, value in _ROW.items() if name != "num_samples"}
    bodies = [
        ("trajectories", arrow_body([{**_ROW, **changed}], {**ARROW_TYPES, **types}), column, words)
        for column, changed, types, words in WRONG_COLUMNS
    ]
    bodies += [
        ("trajectories", arrow_body([missing]), "num_samples", "is missing"),
        ("groups", arrow_body([{**_GROUP, "sample": 0}]), "sample", "is unknown, expected some of"),
        ("groups", arrow_body([{**_GROUP, "extras.state": [0.5]}]), "extras.state", "is unknown"),
    ]
    for route, body, column, words in bodies:
        _check_refused(ingest, route, body, field=f"column {column}", words=words)
    assert reader.ledger() == {}


def test_wrong_arrow_row_is_named(ingest: IngestClient, reader: RunReader) -> None:
    plain: dict[str, dict[str, Any]] = {
        "trajectories": _ROW,
        "turns": {**_ROW, "turn": 0},
        "groups": _GROUP,
    }
    for route, changed, field, words in WRONG_ROWS:
        row = plain[route]
        body = arrow_body([{**row, "group_id": "other"}, {**row, **changed}])
        _check_refused(ingest, route, body, field=f"rows.1.{field}", words=words)
    many = [{**_ROW, "group_id": f"g{number}", "turn": 0} for number in range(2049)]
    for route, row in plain.items():
        body = arrow_body([{name: each[name] for name in row} for each in many])
        _check_refused(ingest, route, body, field="rows", words="more than 2048")
    assert reader.ledger() == {}


def _check_refused(
    ingest: IngestClient, route: str, body: bytes, *, field: str, words: str
) -> None:
    response = ingest.send(route, body, content_type=ARROW)
    assert (response.status_code, response.json()["field"]) == (422, field), response.text
    assert words in response.json()["detail"]


def test_arrow_turns_continue_a_trajectory_until_its_seal(
    ingest: IngestClient, reader: RunReader
) -> None:
    first = {**_ROW, "turn": 0}
    last = {**_ROW, "turn": 1, "num_samples": None, "prompt_ids": [1, 2, 3, 4], "seal": True}

    results = [
        *results_of(ingest.send("turns", arrow_body([first]), content_type=ARROW)),
        *results_of(ingest.send("turns", arrow_body([last, last]), content_type=ARROW)),
    ]

    assert [(each["index"], each["state"]) for each in results] == [
        (0, "open"),
        (0, "sealed"),
        (1, "sealed"),
    ]
    assert reader.states() == {"g/0/0": "sealed"}
    assert len(reader.turns(TrajectoryKey("g", 0))) == 2


def test_damaged_arrow_stream_is_400(ingest: IngestClient) -> None:
    body = arrow_body([_ROW])
    compressed = arrow_body([_ROW], options=pa.ipc.IpcWriteOptions(compression="zstd"))
    long = arrow_body([{**_ROW, "prompt_ids": [7] * 1234}])
    beyond = long.replace(struct.pack("<ii", 0, 1234), struct.pack("<ii", 0, 10**9))
    no_text = body.replace(b"group_id", b"group_\xff\xff")
    cut = [body[:-8], body[:200] + body[-8:]]
    bodies = [b"", b"junk", *cut, beyond, no_text, compressed]

    responses = [ingest.send("trajectories", each, content_type=ARROW) for each in bodies]

    assert [each.status_code for each in responses] == [400] * len(bodies)
    assert "compressed buffers" in responses[-1].json()["detail"]


def test_arrow_rows_of_several_batches_join_in_order(
    ingest: IngestClient, reader: RunReader
) -> None:
    names = ["group_id", "sample", "num_samples", "prompt_ids", "response_ids", "reward"]
    schema = pa.schema({name: ARROW_TYPES[name] for name in names})
    rows = [[n % 2, [1 + n], [9], 1.0] for n in range(4)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for sample, prompt_ids, response_ids, reward in rows:
            values = ["g", sample, 2, prompt_ids, response_ids, reward]
            arrays = [pa.array([v], field.type) for v, field in zip(values, schema, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))

    body = sink.getvalue().to_pybytes()
    results = results_of(ingest.send("trajectories", body, content_type=ARROW))

    assert [(each["sample"], each["next_turn"]) for each in results] == [(0, 2), (1, 2)]
    prompts = [each.token_ids.tolist() for each in reader.turns(TrajectoryKey("g", 1))]
    assert prompts == [[2, 9], [4, 9]]


def test_idempotency_key_is_for_one_body(ingest: IngestClient) -> None:
    item = {**_TURN, **turn_fields(turn("ab", "CD"))}
    key = {"Idempotency-Key": "k-1"}

    malformed = ingest.post("turns", {**item, "sample": "x"}, **key)
    first, again = (ingest.post("turns", item, **key) for _ in range(2))
    other = ingest.post("turns", {**item, "sample": 1}, **key)
    elsewhere = ingest.post("groups", {"group_id": "h", "num_samples": 1}, **key)

    assert first.json() == again.json()
    statuses = [each.status_code for each in (malformed, first, again, other, elsewhere)]
    assert statuses == [422, 200, 200, 422, 200]
    assert other.json()["field"] == "Idempotency-Key"


def test_examples_of_the_openapi_document_are_accepted(ingest: IngestClient) -> None:
    document = ingest.http.get("openapi.json").json()
    for route in ("groups", "turns", "trajectories"):
        described = document["paths"][f"/runs/{{run}}/{route}"]["post"]
        content = described["requestBody"]["content"]["application/json"]

        response = ingest.http.post(f"runs/{ingest.run}/{route}", json=content["example"])

        assert {each["status"] for each in results_of(response)} == {201}, route
        assert "example" in described["responses"]["200"]["content"]["application/json"]
        assert content["schema"]["properties"]["items"]["items"]["properties"]["group_id"]
