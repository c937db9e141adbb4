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
    """Write all records, one group a pipeline, and read them back 128 at a time."""
    client = redis.Redis.from_url(config["redis_url"])
    records = [os.urandom(config["record_bytes"]) for _ in range(config["num_records"])]

    def work(_: dict[str, Any]) -> dict[str, Any]:
        for start in range(0, len(records), RECORDS_PER_ROUND_TRIP):
            pipeline = client.pipeline(transaction=False)
            for index, record in enumerate(records[start : start + RECORDS_PER_ROUND_TRIP], start):
                pipeline.xadd(f"floor:{index}", {b"r": record}, id="0-1")
            pipeline.execute()
        num_bytes = 0
        for start in range(0, len(records), RECORDS_PER_READ):
            pipeline = client.pipeline(transaction=False)
            for index in range(start, min(start + RECORDS_PER_READ, len(records))):
                pipeline.xrange(f"floor:{index}")
            num_bytes += sum(len(entries[0][1][b"r"]) for entries in pipeline.execute())
        client.unlink(*(f"floor:{index}" for index in range(len(records))))
        return {"num_bytes": num_bytes}

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
