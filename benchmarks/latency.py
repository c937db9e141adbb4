"""Seconds from the last seal of a batch until its consumer has it, and those of empty round trips.

    make bench                             # with the others
    python benchmarks/latency.py --tiny    # checks that it works

A batch has 16 groups of the workload of pipeline.py: 128 trajectories, 4 MB. The time begins when
the publisher has the acknowledgement of the last seal, and ends when the consumer has the first
mini-batch as padded tensors.

The baseline is the shortest path through the same transports: one entry of a stream to a reader
that waits for it, and one call of gRPC without content.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import redis
from pipeline import GROUPS_PER_BATCH, Bench

GOAL_S = 0.06


def measure(*, num_rounds: int) -> dict[str, Any]:
    """Return all waits for a batch, and the median of the empty round trips."""
    bench = Bench(num_groups=GROUPS_PER_BATCH, torch_threads=1)
    try:
        rounds = [bench.round(f"latency-{index}") for index in range(num_rounds + 1)]
        empty_s = round_trip_s(bench.server.url)
    finally:
        bench.close()
    waits = [each.after_seal_s for each in rounds[1:]]  # the first round warms up
    return {"after_seal_s": waits, "empty_s": empty_s, "goal_s": GOAL_S}


def round_trip_s(redis_url: str) -> float:
    """Return the median seconds of a wake-up through a stream and an empty call of gRPC."""
    return statistics.median(_wake_up_s(redis_url)) + statistics.median(_calls_s())


def _wake_up_s(redis_url: str, *, num: int = 200) -> list[float]:
    writer, reader = redis.Redis.from_url(redis_url), redis.Redis.from_url(redis_url)
    woken_s: list[float] = []

    def read() -> None:
        last = "0"
        for _ in range(num):
            entries: Any = reader.xread({"latency": last}, block=0, count=1)
            [[_, [[last, _]]]] = entries
            woken_s.append(time.monotonic())

    thread = threading.Thread(target=read)
    thread.start()
    sent_s: list[float] = []
    for number in range(num):
        while len(woken_s) < number:
            time.sleep(0.0005)
        time.sleep(0.001)  # the reader waits again
        sent_s.append(time.monotonic())
        writer.xadd("latency", {"r": b""})
    thread.join()
    return [woken - sent for woken, sent in zip(woken_s, sent_s, strict=True)]


def _calls_s(*, num: int = 200) -> list[float]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("latency.Latency", {"Echo": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/latency.Latency/Echo")
        seconds = [_seconds_of(lambda: call(b"")) for _ in range(num)]
    server.stop(None)
    return seconds


def _seconds_of(work: Callable[[], Any]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="two rounds")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(num_rounds=2 if arguments.tiny else arguments.rounds)
    wait_s, empty_s = statistics.median(found["after_seal_s"]), found["empty_s"]
    print(f"first batch after the last seal  {wait_s:.3f} s, of at most {GOAL_S} s")
    print(f"an empty round trip              {empty_s:.4f} s: {wait_s / empty_s:.0f} times")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
