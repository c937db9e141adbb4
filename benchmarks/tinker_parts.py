"""The parts of a served training call, each on its own: the code of the services, without them."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import redis.asyncio
from hosting import PROTOBUF, training_body
from table import least_ms

from turnstream.records.batches import decode_mini_batch
from turnstream.store.client.connection import connect, connect_async
from turnstream.types import MiniBatch
from turnstream_server.batcher.assembly.operation_shares import (
    OperationPasses,
    cut_operations,
    encode_operation_share,
)
from turnstream_server.gateway.routes.futures import encode_stored
from turnstream_server.gateway.submitting import Prepared, prepare_training
from turnstream_server.gateway.tinker.training_calls import read_training_call
from turnstream_server.operations.contents import CreateModel, fingerprint
from turnstream_server.operations.keys import model_keys
from turnstream_server.operations.log import ModelLog, Run, read_bodies, submit
from turnstream_server.operations.models import BaseModel, ModelRecord, create_model
from turnstream_server.operations.results import Answer, TrainingOutput, encode_result

MODEL = "parts:train:0"
BASE = BaseModel("no worker", context_length=4096, vocab_size=261, tokenizer_id="", max_rank=32)


def decode_call(body: bytes) -> bytes:
    """Return a command from the body of a call, as the gateway makes it, with its fingerprint."""
    call = read_training_call(body, content_type=PROTOBUF, route="forward_backward")
    prepared = prepare_training(call, body, BASE)
    assert isinstance(prepared, Prepared)
    fingerprint(prepared.content)
    return prepared.content


def cut(content: bytes) -> OperationPasses:
    """Return the rows of a command for one rank."""
    return cut_operations(MODEL, {1: content}, first=1, dp_world_size=1)


def rows_of(content: bytes) -> MiniBatch:
    """Return the rows of a command as its worker decodes them."""
    share = encode_operation_share(cut(content), index=0, dp_rank=0)
    return decode_mini_batch(share.data, expected_hash=share.content_hash)


def measure_parts(store_url: str, *, num_data: int, length: int, rounds: int) -> dict[str, float]:
    """Return milliseconds of each part: CPU time of code, and wall time of calls of the store."""
    body = training_body(MODEL, 1, num_data=num_data, length=length)
    content = decode_call(body)
    passes = cut(content)
    share = encode_operation_share(passes, index=0, dp_rank=0)
    output = TrainingOutput(
        [np.zeros(length, np.float32) for _ in range(num_data)], {"loss:sum": 0.0}
    )
    stored = encode_result(output)
    jobs: dict[str, Callable[[], Any]] = {
        "gateway: decode, check, encode": lambda: decode_call(body),
        "batcher: decode, cut": lambda: cut(content),
        "batcher: encode": lambda: encode_operation_share(passes, index=0, dp_rank=0),
        "worker: decode": lambda: decode_mini_batch(share.data, expected_hash=share.content_hash),
        "worker: encode the result": lambda: encode_result(output),
        "gateway: encode the answer": lambda: encode_stored(stored, accept=PROTOBUF),
    }
    parts = {name: least_ms(job, rounds=rounds) for name, job in jobs.items()}
    of_store = asyncio.run(_store_ms(store_url, content, output, rounds=rounds))
    return parts | {f"store: {name}": value for name, value in of_store.items()}


async def _store_ms(
    store_url: str, content: bytes, output: TrainingOutput, *, rounds: int
) -> dict[str, float]:
    """Return the median milliseconds of each call on the way of a command through its log."""
    times_ms: dict[str, list[float]] = {}
    async with connect_async(store_url) as client:
        with connect(store_url) as of_worker:
            record = ModelRecord(MODEL, base_model=BASE.name, owner="parts", lora_rank=1)
            await create_model(client, record, CreateModel(path=None, optimizer=False))
            log = ModelLog.acquire(of_worker, MODEL, worker="parts", lease_s=600)
            log.take()
            log.finish({0: Answer({})})
            for number in range(1, rounds + 1):
                for name, call in _calls(client, log, number, content, output).items():
                    began_s = time.perf_counter()
                    await call()
                    elapsed_ms = 1e3 * (time.perf_counter() - began_s)
                    times_ms.setdefault(name, []).append(elapsed_ms)
            of_worker.delete(*model_keys(MODEL))
    return {name: statistics.median(each) for name, each in times_ms.items()}


def _calls(
    client: redis.asyncio.Redis, log: ModelLog, number: int, content: bytes, output: TrainingOutput
) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return the calls of the store for one command, in their order."""

    async def take() -> None:
        assert isinstance(log.take(), Run)

    async def finish() -> None:
        log.finish({number: output})

    return {
        "append": lambda: submit(client, MODEL, number, "forward_backward", content),
        "take": take,
        "read": lambda: read_bodies(client, MODEL, [number]),
        "finish": finish,
    }
