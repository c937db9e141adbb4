"""The floor: the same payload moved by the bare transports, without any of our code.

Three moves that every design of this shape must make: the bytes through redis-py into a stream
and out again, the bytes through a grpcio server stream, and one copy by numpy.
"""

from __future__ import annotations

import os
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import redis

CHUNK_BYTES = 1 << 20
RECORDS_PER_ROUND_TRIP = 8
RECORDS_PER_READ = 128
_METHOD = "/floor.Floor/Stream"


def start_redis_floor(config: dict[str, Any]) -> Any:
    """Write all records, one group a pipeline, and read them back 128 streams at a time.

    A message may name one phase: "write" or "read". A stream has `records_per_stream` records, by
    default one. `name` is that of the streams.
    """
    client = redis.Redis.from_url(config["redis_url"])
    per_stream = config.get("records_per_stream", 1)
    num_streams = config["num_records"] // per_stream
    keys = [f"{config.get('name', 'floor')}:{index}" for index in range(num_streams)]
    records = [os.urandom(config["record_bytes"]) for _ in range(num_streams * per_stream)]

    def write() -> None:
        for start in range(0, num_streams, RECORDS_PER_ROUND_TRIP):
            group = keys[start : start + RECORDS_PER_ROUND_TRIP]
            for turn in range(per_stream):
                pipeline = client.pipeline(transaction=False)
                for number, key in enumerate(group, start * per_stream + turn * len(group)):
                    pipeline.xadd(key, {b"r": records[number]}, id=f"0-{turn + 1}")
                pipeline.execute()

    def read() -> int:
        num_bytes = 0
        for start in range(0, num_streams, RECORDS_PER_READ):
            pipeline = client.pipeline(transaction=False)
            for key in keys[start : start + RECORDS_PER_READ]:
                pipeline.xrange(key)
            num_bytes += sum(len(entry[b"r"]) for each in pipeline.execute() for _, entry in each)
        client.unlink(*keys)
        return num_bytes

    def work(message: dict[str, Any]) -> dict[str, Any]:
        phase = message.get("phase")
        if phase != "read":
            write()
        return {"num_bytes": read() if phase != "write" else 0}

    return work


def start_grpc_server(config: dict[str, Any]) -> Any:
    """Serve `num_bytes` as a stream of raw 1 MiB messages."""
    chunk = os.urandom(CHUNK_BYTES)
    num_chunks = config["num_bytes"] // CHUNK_BYTES

    def stream(request: bytes, context: grpc.ServicerContext) -> Any:
        for _ in range(num_chunks):
            yield chunk

    handler = grpc.unary_stream_rpc_method_handler(stream)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("floor.Floor", {"Stream": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def work(_: dict[str, Any], *, _keep: grpc.Server = server) -> dict[str, Any]:
        return {"port": port}  # the server ends with its last reference

    return work


def start_grpc_client(config: dict[str, Any]) -> Any:
    """Receive the stream and drop it."""
    channel = grpc.insecure_channel(f"127.0.0.1:{config['port']}")
    call = channel.unary_stream(_METHOD)

    def work(_: dict[str, Any]) -> dict[str, Any]:
        return {"num_bytes": sum(len(chunk) for chunk in call(b""))}

    return work


def start_numpy_copy(config: dict[str, Any]) -> Any:
    """Copy the payload once, batch by batch, into new memory."""
    source = np.ones(config["num_bytes"] // config["num_batches"], np.uint8)

    def work(_: dict[str, Any]) -> dict[str, Any]:
        copies = [source.copy() for _ in range(config["num_batches"])]
        return {"num_bytes": sum(map(len, copies))}

    return work
