"""The largest accepted request of each route of the gateway."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import httpx2
import numpy as np
import pyarrow as pa
import redis

from testkit.requests.ingest import ARROW
from testkit.runs.large_runs import NUM_EVENTS, LargeRun
from testkit.services.gateway_process import GatewayProcess
from turnstream.batching.config import BatchingConfig
from turnstream.generator.requests import (
    AppendTurns,
    Lease,
    OpenGroup,
    ReadConfig,
    ReadTurns,
    RenewLeases,
    Reservation,
    Reserve,
)
from turnstream.generator.transport.messages import MEDIA_TYPE as CALLS
from turnstream.generator.transport.messages import call_of
from turnstream.records.events import EVENT_NAMES
from turnstream.records.turns import encode_turn
from turnstream.store.client.keys import trajectory_keys
from turnstream.store.run.groups import MAX_HEARTBEATS
from turnstream.store.run.runs import create_run
from turnstream.types import GroupOpened, StoredTurn
from turnstream.wire import tinker_pb2 as wire
from turnstream.wire.v1 import calls_pb2 as calls_wire
from turnstream_server.gateway.bodies import (
    MAX_BRACKETS,
    MAX_JSON_BYTES,
    MAX_QUOTES,
    MAX_SMALL_BYTES,
)
from turnstream_server.gateway.rest.bodies import (
    MAX_ITEMS,
    MAX_MEMBERS_OF_GROUPS,
    MAX_TURNS,
    MAX_WRITES,
)
from turnstream_server.gateway.rest.bodies import MAX_SMALL_BYTES as MAX_REST_BYTES
from turnstream_server.gateway.rest.generators.plan import MAX_CALLS, MAX_FIELDS, MAX_READS
from turnstream_server.gateway.rest.ingest.arrow_bodies import MAX_PARTS, MAX_VALUES
from turnstream_server.gateway.rest.runs.sessions import MAX_TEXT
from turnstream_server.ledger.core.scan import PAGE_EVENTS
from turnstream_server.operations.models import BaseModel

LONG_EVENTS: Final = 5
"""Events of the largest size, each of which is a slice."""

BASE: Final = BaseModel("tiny/limits", 131_072, 200_000, "", 32)
_numbers = itertools.count(1)


class World(NamedTuple):
    """A gateway process, and what requests name.

    Attributes:
        large: name of a run that is large in every respect.
        long_events: name of a run with events of the largest size.
    """

    http: httpx2.Client
    client: redis.Redis
    gateway: GatewayProcess
    session: str
    model: str
    sampler: str
    large: str
    long_events: str

    def new_run(self) -> str:
        """Return a new run with the widest limits."""
        run = f"run-{next(_numbers)}"
        config = BatchingConfig(batch_groups=8192, mini_batch_groups=8192, max_samples=8192)
        create_run(self.client, run, config)
        return run


class Sent(NamedTuple):
    """A request of a route: the values of its path, its body and its headers.

    Attributes:
        query: query of the address.
        key: a session key in place of the API key.
        events: server-sent events that are read; 0 reads the whole response.
        slices: replies of the store in which these events come, at least.
    """

    path: dict[str, Any]
    body: bytes = b""
    content_type: str = "application/json"
    accepted: tuple[int, ...] = (200,)
    query: str = ""
    key: str = ""
    events: int = 0
    slices: int = 0


Entry = Callable[[World], Iterator[Sent]]
ANY: Final = (200, 201, 204, 400, 404, 409, 410, 415, 422, 503)


def plain(world: World) -> Iterator[Sent]:
    """A route whose arguments are all in its path."""
    named = {"session_id": world.session, "model_id": world.model, "sampler_id": world.sampler}
    long = dict.fromkeys(("name", "kind", "token"), "n" * 512)
    counts = dict.fromkeys(("sample", "step", "index"), 2**31 - 1)
    path = {**named, **long, **counts, "run": world.new_run(), "group": "g" * 512}
    yield Sent(path, accepted=ANY)


def small(world: World, *, most: int = MAX_SMALL_BYTES, **fields: Any) -> Iterator[Sent]:
    """A route with a small body: all fields of all of them, filled up with metadata."""
    named = {"session_id": world.session, "model_id": world.model, "seq_id": next(_numbers)}
    named |= {"base_model": BASE.name, "sampling_session_seq_id": next(_numbers)}
    named |= {"model_seq_id": next(_numbers), "request_id": f"{world.model}:1", "path": "p" * 128}
    named |= {"tinker_path": f"tinker://{world.model}/weights/a", "run": world.new_run(), **fields}
    room = (most - len(json.dumps(named)) - 64) // 2
    for fill in ({f"k{n:06}": 0 for n in range(room // 12)}, [[]] * (room // 3)):
        (path,) = plain(world)
        yield path._replace(body=_json({**named, "user_metadata": fill, "settings": fill}))


def reads(**paths: Any) -> Entry:
    """Return the requests of a route that reads the large run, one per value of each name.

    `query` has queries of the address; the other names are in the path.
    """

    def entry(world: World) -> Iterator[Sent]:
        for values in zip(*paths.values(), strict=True):
            named = dict(zip(paths, values, strict=True))
            query = named.pop("query", "")
            accepted = (404,) if named.get("group") == "never" else (200,)
            yield Sent({"run": world.large, **named}, query=query, accepted=accepted)

    return entry


def events(world: World) -> Iterator[Sent]:
    """The events of a large run, and some of the largest size."""
    kinds = ",".join(EVENT_NAMES * 100)
    slices = NUM_EVENTS // PAGE_EVENTS
    yield Sent(
        {"run": world.large}, query=f"start=oldest&kinds={kinds}", events=NUM_EVENTS, slices=slices
    )
    yield Sent({"run": world.long_events}, events=LONG_EVENTS, slices=LONG_EVENTS)


def deletion(world: World) -> Iterator[Sent]:
    """A run with a large ledger: the payload of each trajectory is removed."""
    doomed = LargeRun(world.client, "doomed")
    doomed.write_ledger()
    yield Sent({"run": doomed.run})


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


def sessions(world: World) -> Iterator[Sent]:
    """A session key with names of the largest size, and a body that is padded."""
    texts = {"prompt_uid": "\x01" * MAX_TEXT, "policy": "\x01" * MAX_TEXT}
    numbers = dict.fromkeys(("max_calls", "max_tokens"), 2**53 - 1)
    named = {"group_id": "g" * 512, "sample": 0, "num_samples": 1, **texts, **numbers}
    path = {"run": world.new_run()}
    yield Sent(path, _json(named))
    yield Sent(path, _json(named) + b" " * (MAX_REST_BYTES - len(_json(named))))
    yield from small(world, most=MAX_REST_BYTES)


def model_call(world: World) -> Iterator[Sent]:
    """A call with many messages, one with much text, and answers of the largest size."""
    run = world.new_run()
    url = f"/v1/runs/{run}/sessions"
    content = {"group_id": "g", "sample": 0, "num_samples": 1}
    key = world.http.post(url, json=content).raise_for_status().json()["key"]
    path = {"run": run, "group": "g", "sample": 0}
    message = {"role": "user", "content": ""}
    many = [message] * (MAX_QUOTES // 8 - 16)
    texts = [{"role": "user", "content": "x" * (MAX_JSON_BYTES - 256)}]
    for messages in (many, texts, [message]):
        for is_stream in (False, True):
            body = {"model": "policy", "messages": messages, "prompt": "x", "stream": is_stream}
            yield Sent(path, _json(body), key=key, accepted=(200, 409))


def message_call(world: World) -> Iterator[Sent]:
    """The same calls, of the API of Anthropic."""
    yield from _renamed(world, "messages")


def response_call(world: World) -> Iterator[Sent]:
    """The same calls, of the Responses API."""
    yield from _renamed(world, "input")


def _renamed(world: World, name: str) -> Iterator[Sent]:
    for sent in model_call(world):
        body = json.loads(sent.body)
        kept = {each: body[each] for each in ("model", "stream")}
        yield sent._replace(body=_json({**kept, name: body["messages"]}))


def session_end(world: World) -> Iterator[Sent]:
    """The end of a session, with all fields of small bodies."""
    (first, *_) = model_call(world)
    tags = {f"t{n:02}" * 16: "x" * 60 for n in range(64)}
    yield first._replace(body=_json({"reward": 1.0, "tags": tags}), accepted=ANY)
    yield first._replace(body=_json({"abandon": "x" * MAX_REST_BYTES}), accepted=ANY)


def of_session(world: World) -> Iterator[Sent]:
    """A route of a session without a body."""
    (first, *_) = model_call(world)
    yield first._replace(body=b"", accepted=ANY)


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
    for tokens in ([257] * (BASE.context_length - 1), [257] * ((MAX_JSON_BYTES - 1024) // 4)):
        fields = {"sampling_session_id": world.sampler, "seq_id": next(_numbers)}
        fields |= {"num_samples": 4_096, "sampling_params": {}}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        yield Sent({}, _json({**fields, "prompt": prompt}))


def calls(world: World) -> Iterator[Sent]:
    """Many calls of each kind that has lists, a body of turns, and a trajectory that is read."""
    run, room = world.new_run(), MAX_FIELDS - 64

    def body(requests: Iterable[Any]) -> Sent:
        message = calls_wire.Calls(run=run, writer="w", calls=map(call_of, requests))
        return Sent({}, message.SerializeToString(), CALLS)

    leases = [Lease(f"g/{n}/0", 1) for n in range(MAX_HEARTBEATS)]
    yield body(RenewLeases(run, "w", leases) for _ in range(room // (8 * MAX_HEARTBEATS)))
    wanted = [Reservation(*each, 1 << 20) for each in leases]
    yield body(Reserve(run, "w", wanted) for _ in range(room // (9 * MAX_HEARTBEATS)))
    size = 4_096
    for number in (1, room // (2 * size)):
        groups = [
            GroupOpened(group_id=f"g{n}", prompt_uid="", num_samples=size) for n in range(number)
        ]
        yield body(
            OpenGroup(run, "w", each, [f"{each.group_id}/{n}/0" for n in range(size)])
            for each in groups
        )
    yield body(ReadConfig(run) for _ in range(MAX_READS))
    turn = encode_turn(
        StoredTurn(
            index=0,
            parent_turn=-1,
            shared_tokens=0,
            num_response_tokens=1,
            token_ids=np.ones(100, np.int32),
        )
    )
    yield body(AppendTurns(run, "w", f"h/{n}/0", 1, records=[turn]) for n in range(MAX_CALLS))
    payload = trajectory_keys(run, "large/0/0")
    for _ in range(6):
        world.client.xadd(payload.turns, {"r": bytes(8 << 20)})
    yield body([ReadTurns(run, "large/0/0")])
