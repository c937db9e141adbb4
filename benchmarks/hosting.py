"""The processes of hosted models for benchmarks, and a small client of their HTTP API."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from turnstream.store.client.connection import connect
from turnstream.wire import tinker_pb2 as wire
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.launch.stack import Service, Stack
from turnstream_server.launch.up import API_KEY
from turnstream_server.models.byte_model import write_byte_model
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.operations.models import read_bases

PREFIX = "/api/v1"
PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """Running processes of hosted models.

    Attributes:
        address: "host:port" of the gateway.
        store_url: the store.
        batcher: "host:port" of the batcher.
        bases: folder of each base model, by its name.
        pids: process id of each process, by its name.
        engine_log: log of the engine, with its times.
    """

    address: str
    store_url: str
    batcher: str
    bases: dict[str, Path]
    pids: dict[str, int]
    engine_log: Path
    services: list[Service] = field(default_factory=list[Service])


@contextmanager
def hosted(specs: dict[str, SmallModelSpec]) -> Iterator[Hosted]:
    """Yield the processes that serve base models of these names and sizes; one torch thread each.

    The engine logs the times of each call.
    """
    with TemporaryDirectory() as name, EmbeddedServer() as store:
        folder = Path(name)
        bases = {each: folder / "bases" / each for each in specs}
        for each, spec in specs.items():
            write_byte_model(bases[each], spec)
        models = [f"--base-model={each}={path}" for each, path in bases.items()]
        workers = {"folder": folder / "models", "threads": 1}
        verbose = {"TURNSTREAM_LOG_LEVEL": "DEBUG"}
        with (
            Stack(folder, store_url=store.url) as stack,
            Stack(folder, store_url=store.url, environment=verbose) as logged,
        ):
            batcher = stack.start_batcher()
            address_file = folder / "gateway.address"
            gateway = stack.start(
                "gateway", "gateway", listen="127.0.0.1:0", address_file=address_file
            )
            sampler = stack.start("sampler", "sampler", *models, **workers)
            engine = logged.start("engine", "engine", *models, **workers)
            services = [gateway, batcher, engine, sampler]
            address = stack.wait_for_file(address_file, of=gateway, timeout_s=60)
            with connect(store.url) as client:
                for _ in logged.watch(timeout_s=120):
                    if len(read_bases(client)) == len(specs):
                        break
            yield Hosted(
                address=address,
                store_url=store.url,
                batcher=batcher.address,
                bases=bases,
                pids={"store": store.pid, **{each.name: each.pid for each in services}},
                engine_log=engine.log_path,
                services=services,
            )


class Client:
    """One connection to a gateway; calls are those of the tinker SDK 0.38."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=600)

    def call(self, route: str, **content: Any) -> dict[str, Any]:
        """Return the JSON that answers a call with JSON."""
        return json.loads(self.post(route, json.dumps(content).encode()))

    def post(self, route: str, body: bytes, *, content_type: str = "application/json") -> bytes:
        """Return the body that answers a call; a status other than 200 is an error."""
        accept = f"{PROTOBUF}, application/json"
        headers = {"X-API-Key": API_KEY, "Content-Type": content_type, "Accept": accept}
        self._connection.request("POST", f"{PREFIX}/{route}", body, headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{route}: {answer.status} {content[:300]!r}")
        return content

    def result(self, request_id: str) -> bytes:
        """Return the result of a request that must be there within the time of a poll."""
        poll = {"request_id": request_id, "allow_metadata_only": True}
        return self.post("retrieve_future", json.dumps(poll).encode())

    def create_model(self, base_model: str, *, rank: int) -> str:
        """Return the id of a new model in a new session."""
        session = self.call("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")
        made = self.call(
            "create_model",
            session_id=session["session_id"],
            model_seq_id=0,
            base_model=base_model,
            lora_config={"rank": rank, "seed": 1},
        )
        self.result(made["request_id"])
        return made["model_id"]

    def train(self, body: bytes) -> str:
        """Submit a training call, and return its request id."""
        answer = self.post("forward_backward", body, content_type=PROTOBUF)
        return json.loads(answer)["request_id"]


def training_body(
    model_id: str, number: int, *, num_data: int, length: int, seed: int = 0
) -> bytes:
    """Return a `forward_backward` with importance sampling, as the SDK encodes it."""
    rng = np.random.default_rng(seed)
    data = [_datum(rng, length) for _ in range(num_data)]
    return wire.ForwardBackwardRequest(
        model_id=model_id, seq_id=number, data=data, loss_fn="importance_sampling"
    ).SerializeToString()


def _datum(rng: np.random.Generator, length: int) -> wire.Datum:
    tokens = rng.integers(0, 256, length + 1)
    floats = {
        "logprobs": rng.normal(-5.5, 0.3, length).astype("<f4"),
        "advantages": rng.normal(size=length).astype("<f4"),
    }
    inputs = {
        "target_tokens": wire.Tensor(
            dense=tokens[1:].astype("<i8").tobytes(), dtype=wire.DTYPE_INT64, shape=[length]
        )
    }
    for name, values in floats.items():
        inputs[name] = wire.Tensor(dense=values.tobytes(), dtype=wire.DTYPE_FLOAT32, shape=[length])
    text = wire.Tokens(tokens=tokens[:-1].astype("<i4").tobytes())
    return wire.Datum(model_input=[wire.Chunk(encoded_text=text)], loss_fn_inputs=inputs)
