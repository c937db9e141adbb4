"""The cost of the largest accepted request of every route of the gateway.

The routes are those of the application: a new one needs an entry in `LARGEST`.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

import httpx2
import numpy as np
import pyarrow as pa
import pytest
import redis

from testkit.gateway_process import Cost, GatewayProcess
from testkit.ingest import ARROW
from turnstream.batching.config import BatchingConfig
from turnstream.store.client.connection import connect, connect_async
from turnstream.store.run.runs import create_run
from turnstream.wire import tinker_pb2 as wire
from turnstream_server.commands.bases import BaseModel, register_base
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.app import make_app
from turnstream_server.gateway.bodies import MAX_SMALL_BYTES
from turnstream_server.gateway.body_limits import MAX_BRACKETS, MAX_JSON_BYTES
from turnstream_server.gateway.config import GatewayOptions
from turnstream_server.gateway.rest.bodies import (
    MAX_ITEMS,
    MAX_MEMBERS_OF_GROUPS,
    MAX_TURNS,
    MAX_WRITES,
)
from turnstream_server.gateway.rest.ingest.arrow_bodies import MAX_PARTS, MAX_VALUES
from turnstream_server.gateway.rest.small_bodies import MAX_SMALL_BYTES as MAX_REST_BYTES
from turnstream_server.gateway.state import Gateway

MOST: Final = Cost(cpu_s=2.0, memory_mb=256.0)
_BASE: Final = BaseModel("tiny/limits", 131_072, 200_000, "", 32)
_KEY: Final = {"X-API-Key": "tml-limits"}  # the Tinker API needs one, also on the loopback
_numbers = itertools.count(1)


class World(NamedTuple):
    """A gateway process, and what requests name."""

    http: httpx2.Client
    client: redis.Redis
    gateway: GatewayProcess
    session: str
    model: str
    sampler: str

    def new_run(self) -> str:
        """Return a new run with the widest limits."""
        run = f"run-{next(_numbers)}"
        config = BatchingConfig(batch_groups=8192, mini_batch_groups=8192, max_samples=8192)
        create_run(self.client, run, config)
        return run


class Sent(NamedTuple):
    """A request of a route: the values of its path, its body and its headers."""

    path: dict[str, Any]
    body: bytes = b""
    content_type: str = "application/json"
    accepted: tuple[int, ...] = (200,)


Entry = Callable[[World], Iterator[Sent]]
_ANY: Final = (200, 201, 204, 400, 404, 409, 410, 415, 422, 503)


def plain(world: World) -> Iterator[Sent]:
    """A route whose arguments are all in its path."""
    named = {"session_id": world.session, "model_id": world.model, "sampler_id": world.sampler}
    long = dict.fromkeys(("name", "kind", "token"), "n" * 512)
    counts = dict.fromkeys(("sample", "step", "index"), 2**31 - 1)
    path = {**named, **long, **counts, "run": world.new_run(), "group": "g" * 512}
    yield Sent(path, accepted=_ANY)


def small(world: World, *, most: int = MAX_SMALL_BYTES, **fields: Any) -> Iterator[Sent]:
    """A route with a small body: all fields of all of them, filled up with metadata."""
    named = {"session_id": world.session, "model_id": world.model, "seq_id": next(_numbers)}
    named |= {"base_model": _BASE.name, "sampling_session_seq_id": next(_numbers)}
    named |= {"model_seq_id": next(_numbers), "request_id": f"{world.model}:1", "path": "p" * 128}
    named |= {"tinker_path": f"tinker://{world.model}/weights/a", "run": world.new_run(), **fields}
    room = (most - len(json.dumps(named)) - 64) // 2
    for fill in ({f"k{n:06}": 0 for n in range(room // 12)}, [[]] * (room // 3)):
        (path,) = plain(world)
        yield path._replace(body=_json({**named, "user_metadata": fill, "settings": fill}))


def _json(content: Any) -> bytes:
    body = json.dumps(content, separators=(",", ":")).encode()
    assert len(body) <= MAX_JSON_BYTES, f"the test makes a body of {len(body)} bytes"
    return body


def _items(world: World, items: Sequence[Any], **fields: Any) -> Sent:
    path = {"run": world.new_run()}
    return Sent(path, _json({"items": items}), **fields)


def _of_parts(world: World, head: bytes) -> Sent:
    """A body with as many objects and lists as JSON may have."""
    room = MAX_BRACKETS - 16
    return Sent({"run": world.new_run()}, head + b"[]," * room + b"[]]}]}", accepted=(400, 422))


def groups(world: World) -> Iterator[Sent]:
    size = MAX_MEMBERS_OF_GROUPS // MAX_WRITES
    many = [{"group_id": f"g{n}", "num_samples": size} for n in range(MAX_WRITES)]
    yield _items(world, many)
    yield _items(world, [{"group_id": f"g{n}", "num_samples": 4096} for n in range(2)])
    yield _of_parts(world, b'{"items":[{"group_id":"g","num_samples":4096,"samples":[')


def _member(number: int) -> dict[str, Any]:
    return {"group_id": f"g{number // 8}", "sample": number % 8, "num_samples": 8}


_LABELS: Final = {f"{n:03}": "v" * 8 for n in range(64)}
_SEAL: Final = {"tags": _LABELS, "metrics": dict.fromkeys(_LABELS, 1.5)}
_ONE_TURN: Final = {"prompt_ids": [257] * 60, "response_ids": [257] * 20, "logprobs": [-0.5] * 20}


def turns(world: World) -> Iterator[Sent]:
    for seal in ({"reward": 1.0, "tags": {"a": "b"}}, _SEAL):
        each = {"turn": 0, **_ONE_TURN, "seal": seal}
        yield _items(world, [{**_member(n), **each} for n in range(MAX_WRITES)])
    ids = [257] * ((MAX_JSON_BYTES - 4096) // 4 // 2)
    yield _items(world, [{**_member(0), "turn": 0, "prompt_ids": ids, "response_ids": ids}])
    yield _of_parts(world, b'{"items":[{"group_id":"g","sample":0,"num_samples":1,"extras":[')
    yield from _arrow(world, turn=True)


def trajectories(world: World) -> Iterator[Sent]:
    each = {"turns": [_ONE_TURN] * (MAX_TURNS // MAX_WRITES), "reward": 1.0}
    yield _items(world, [{**_member(n), **each} for n in range(MAX_WRITES)])
    yield _items(world, [{**_member(0), "turns": [_ONE_TURN] * MAX_TURNS}])
    yield _of_parts(world, b'{"items":[{"group_id":"g","sample":0,"num_samples":1,"turns":[{"x":[')
    yield from _arrow(world, turn=False)


def _arrow(world: World, *, turn: bool) -> Iterator[Sent]:
    """As many rows, numbers and entries of maps as an Arrow stream may have, alone and together."""
    narrow = MAX_VALUES // 4
    for num_rows, num_values, is_wide in ((MAX_WRITES, narrow, True), (1, narrow, False)):
        columns: dict[str, Any] = {
            "group_id": pa.array([f"g{n // 8}" for n in range(num_rows)]),
            "sample": pa.array([n % 8 for n in range(num_rows)], pa.int32()),
            "num_samples": pa.array([8] * num_rows, pa.int32()),
        }
        names = ["prompt_ids", "response_ids", "logprobs", "loss_mask"]
        for name in names:
            ids, logprobs = (np.int32, np.float32) if is_wide else (np.uint8, np.float16)
            kind = {"logprobs": logprobs, "loss_mask": np.uint8}.get(name, ids)
            values = np.zeros(num_values, kind)
            offsets = np.linspace(0, num_values, num_rows + 1).astype(np.int32)
            columns[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
        labels = [[(f"k{n:02}", 1.5) for n in range(MAX_PARTS // MAX_WRITES)]] * num_rows
        columns["metrics"] = pa.array(labels, pa.map_(pa.string(), pa.float64()))
        if turn:
            columns["turn"] = pa.array([0] * num_rows, pa.int32())
            columns["seal"] = pa.array([True] * num_rows)
        batch = pa.record_batch(list(columns.values()), names=list(columns))
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield Sent({"run": world.new_run()}, sink.getvalue(), ARROW)


def rewards(world: World) -> Iterator[Sent]:
    components = {f"{n:02}": 1.5 for n in range(56)}
    items = [{"group_id": f"g{n}", "sample": 0, "reward": 1.0} for n in range(MAX_ITEMS)]
    yield _items(world, items)
    yield _items(world, [{**each, "reward_components": components} for each in items])


def prompts(world: World) -> Iterator[Sent]:
    each = {"text": "p" * 1_300, "num_samples": 8}
    listed = [{"prompt_uid": f"p{n}", **each} for n in range(MAX_ITEMS)]
    yield Sent({"run": world.new_run()}, _json({"first": 1, "prompts": listed}))


def tasks_end(world: World) -> Iterator[Sent]:
    members = [{"sample": n, "attempt": 999} for n in range(MAX_ITEMS)]
    body = _json({"group_id": "g", "trajectories": members, "reason": "r" * 1_000})
    yield Sent({"run": world.new_run()}, body)


def training(world: World) -> Iterator[Sent]:
    """Many datums, and much of each, in both encodings."""
    for num_datums, length in ((4_096, 100), (48, 32_768)):
        request = wire.ForwardBackwardRequest(model_id=world.model, seq_id=next(_numbers))
        request.loss_fn = "ppo"
        for _ in range(num_datums):
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = bytes(4 * length)
            for name, size in (("target_tokens", 8), ("logprobs", 4), ("advantages", 4)):
                tensor = datum.loss_fn_inputs[name]
                tensor.dense = bytes(size * length)
                tensor.dtype = wire.DTYPE_INT64 if size == 8 else wire.DTYPE_FLOAT32
        yield Sent({}, request.SerializeToString(), "application/x-protobuf")
    values = {"data": [257] * 180_000, "dtype": "int64"}
    numbers = {**values, "data": [-0.5] * 180_000, "dtype": "float32"}
    inputs = {"target_tokens": values, "logprobs": numbers, "advantages": numbers}
    datum = {"model_input": {"chunks": [{"tokens": [257] * 180_000}]}, "loss_fn_inputs": inputs}
    call = {"data": [datum], "loss_fn": "ppo"}
    fields = {"model_id": world.model, "seq_id": next(_numbers)}
    yield Sent({}, _json({**fields, "forward_input": call, "forward_backward_input": call}))


def sample(world: World) -> Iterator[Sent]:
    for tokens in ([257] * (_BASE.context_length - 1), [257] * ((MAX_JSON_BYTES - 1024) // 4)):
        fields = {"sampling_session_id": world.sampler, "seq_id": next(_numbers)}
        fields |= {"num_samples": 4_096, "sampling_params": {}}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        yield Sent({}, _json({**fields, "prompt": prompt}))


_CHECKPOINTS: Final = "/api/v1/training_runs/{model_id}/checkpoints"
_RUN: Final = "/v1/runs/{run}"
_SMALL: Final = (
    *("retrieve_future", "cancel_future", "create_sampling_session", "optim_step"),
    *("forward_backward_run", "save_weights", "save_weights_for_sampler", "save_weights_external"),
    *("load_weights", "get_info", "weights_info", "create_session", "session_heartbeat"),
    *("sessions/{session_id}/finish", "create_model", "client/config", "client/dynamic_config"),
    "telemetry",
)
_PLAIN: Final = (
    *("/healthz", "/readyz", "/metrics", "/v1/openapi.json", "/v1/runs", _RUN, f"{_RUN}/ledger"),
    *(f"{_RUN}/{name}" for name in ("batches", "versions", "waits", "batches/{step}")),
    *(f"{_RUN}/batches/{{step}}/{{index}}", f"{_RUN}/trajectories/{{group:path}}/{{sample}}"),
    *(f"/api/v1/{name}" for name in ("samplers/{sampler_id}", "get_server_capabilities")),
    *(f"/api/v1/{name}" for name in ("sessions", "sessions/{session_id}", "healthz")),
    *(f"/api/v1/{name}" for name in ("training_runs", "training_runs/{model_id}", "checkpoints")),
    *("/api/v1/downloads/{token}/{name:path}", _CHECKPOINTS),
    f"{_CHECKPOINTS}/external_weights/{{name}}/external_weights_urls",
)
_rest = functools.partial(small, most=MAX_REST_BYTES)
LARGEST: Final[dict[str, Entry]] = {
    f"POST {_RUN}/groups": groups,
    f"POST {_RUN}/turns": turns,
    f"POST {_RUN}/trajectories": trajectories,
    f"POST {_RUN}/rewards": rewards,
    f"POST {_RUN}/prompts": prompts,
    f"POST {_RUN}/tasks/end": tasks_end,
    "POST /api/v1/forward_backward": training,
    "POST /api/v1/forward": training,
    "POST /api/v1/asample": sample,
    "POST /v1/runs": _rest,
    f"PATCH {_RUN}/config": _rest,
    **{f"POST {_RUN}/{name}": _rest for name in ("pause", "close", "tasks", "refills", "versions")},
    **{f"POST /api/v1/{name}": small for name in _SMALL},
    f"PUT {_CHECKPOINTS}/{{kind}}/{{name}}/ttl": small,
    **{f"GET {path}": plain for path in _PLAIN},
    f"POST {_RUN}/resume": plain,
    f"POST {_RUN}/reopen": plain,
    f"DELETE {_RUN}": plain,
    f"DELETE {_CHECKPOINTS}/{{kind}}/{{name}}": plain,
    f"POST {_CHECKPOINTS}/{{kind}}/{{name}}/publish": plain,
    f"DELETE {_CHECKPOINTS}/{{kind}}/{{name}}/publish": plain,
}
"""The largest requests by method and path of their route."""

_OTHERS: Final = {
    "GET /v1/runs/{run}/events": "a response without end, in slices; see test_events.py",
    "POST /v1/store": "commands of the SDK, each of which has limits",
}
"""Routes that are not measured here, with the reason."""


def all_routes() -> list[str]:
    """Return method and path of each route of the application."""

    def walk(routes: Sequence[Any], prefix: str = "") -> Iterator[str]:
        for each in routes:
            if (router := getattr(each, "original_router", None)) is not None:
                yield from walk(router.routes, prefix + each.include_context.prefix)
            elif not hasattr(each, "methods"):
                yield from walk(each.app.routes, prefix + each.path)
            else:
                names = sorted(each.methods - {"HEAD", "OPTIONS"})
                yield from (f"{method} {prefix}{each.path}" for method in names)

    url = "redis://127.0.0.1:1"  # it is never used
    gateway = Gateway(GatewayOptions(redis_url=url), connect_async(url), cast("Any", None))
    return [*walk(make_app(gateway).routes)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    file = tmp_path_factory.mktemp("gateway") / "address"
    with (
        EmbeddedServer() as server,
        connect(server.url) as client,
        GatewayProcess(server.url, file) as gateway,
        httpx2.Client(base_url=gateway.base_url, headers=_KEY, timeout=120) as http,
    ):
        register_base(client, _BASE)
        post = functools.partial(_content, http)
        session = post("create_session")["session_id"]
        made = {"session_id": session, "base_model": _BASE.name}
        model = post("create_model", **made, model_seq_id=0)["model_id"]
        opened = post("create_sampling_session", **made, sampling_session_seq_id=0)
        world = World(http, client, gateway, session, model, opened["sampling_session_id"])
        warm = json.dumps({"items": [], "x": "-" * 300_000})  # starts the process that parses
        http.post(f"/v1/runs/{world.new_run()}/turns", content=warm, headers=_typed(ARROW[:0]))
        yield world


def _typed(content_type: str) -> dict[str, str]:
    return {"content-type": content_type or "application/json"}


def _content(http: httpx2.Client, route: str, **fields: Any) -> Any:
    answer = http.post(f"/api/v1/{route}", json=fields)
    assert answer.is_success, answer.text
    return answer.json()


def test_every_route_has_an_entry() -> None:
    routes = all_routes()

    for route in routes:
        assert route in LARGEST or route in _OTHERS, (
            f"route {route} has no entry: add its largest request to LARGEST in test_routes.py"
        )
    assert {*LARGEST, *_OTHERS} <= {*routes}, "LARGEST has a route that does not exist"


@pytest.mark.parametrize("route", LARGEST)
def test_largest_request_of_a_route_is_cheap(world: World, route: str) -> None:
    method, path = route.split(" ")
    for number, sent in enumerate(LARGEST[route](world)):
        register_base(world.client, _BASE)
        url = re.sub(r"\{(\w+)[^}]*\}", lambda found: str(sent.path[found[1]]), path)  # noqa: B023
        headers = _typed(sent.content_type)
        with world.gateway.measured() as costs:
            answer = world.http.request(method, url, content=sent.body, headers=headers)

        (cost,) = costs
        named = f"request {number} of {route}, of {len(sent.body)} bytes"
        assert answer.status_code in (*sent.accepted, *(_ANY if not sent.body else ())), answer.text
        assert cost.cpu_s <= MOST.cpu_s, f"{named}: {cost.cpu_s:.2f} s of CPU time"
        assert cost.memory_mb <= MOST.memory_mb, f"{named}: {cost.memory_mb:.0f} MB of memory"
