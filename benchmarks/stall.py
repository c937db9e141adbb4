"""How long the batcher's event loop stands still while it assembles a batch of 64 MB.

    make bench                               # with the others
    python benchmarks/stall.py --tiny        # sees that it works

A task in the loop sleeps for a millisecond, again and again. The excess of a sleep is a stall, in
which no call is answered. One run prints three lines:

    idle       nothing to do: what the machine itself adds
    batcher    a batch is planned, checked, assembled, encoded and sent to a rank
    on loop    the same batch assembled and encoded by the loop itself, as a service does that has
               no threads for it: the baseline

The interpreter is set up as that of a batcher process. On a busy machine a process stands still
also because others run. A second pair of columns has the process's own part of such a stall:
the CPU time of the whole process during it, at most the stall itself.

Leases do not depend on this loop: a thread of their own renews them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from processes import Role, serve_role
from workload import make_groups

HERE = Path(__file__)
TICK_S = 0.001
GOAL_MS = 50.0
FULL = {"groups": 384, "rounds": 5}
TINY = {"groups": 2, "rounds": 1}


# ------------------------------------------------------------------------------ roles


class Loop:
    """A batcher in an event loop of its own, with a task beside it that notices stalls."""

    def __init__(self, redis_url: str) -> None:
        self._url = redis_url
        self._loop = asyncio.new_event_loop()
        self._stalls_s: list[tuple[float, float]] = []
        self.address = ""
        is_up = threading.Event()
        threading.Thread(target=self._run, args=(is_up,), daemon=True).start()
        is_up.wait(30)

    def _run(self, is_up: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(is_up))

    async def _serve(self, is_up: threading.Event) -> None:
        from turnstream_server.batcher.serving.service import BatcherOptions, serving
        from turnstream_server.interpreter import tune_process

        async with serving(BatcherOptions(redis_url=self._url)) as address:
            tune_process()
            self.address = address
            is_up.set()
            while True:
                start_s, cpu_start_s = time.perf_counter(), time.process_time()
                await asyncio.sleep(TICK_S)
                stall_s = time.perf_counter() - start_s - TICK_S
                own_s = min(stall_s, time.process_time() - cpu_start_s)
                self._stalls_s.append((stall_s, own_s))

    def longest_stalls_s(self) -> tuple[float, float]:
        """Since it was last asked: the longest stall, and the longest own part of one."""
        found, self._stalls_s = [*self._stalls_s, (0.0, 0.0)], []
        return max(stall_s for stall_s, _ in found), max(own_s for _, own_s in found)

    def assemble_on_loop(self, run: str) -> int:
        """The first step of a run, by the loop itself; bytes."""
        from turnstream_server.batcher.assembly.assembler import assemble_batch, read_planned_batch

        async def assemble() -> int:
            batch = read_planned_batch(self._url, run, 1)
            made = assemble_batch(self._url, batch, dp_rank=0, dp_world_size=1)
            return sum(each.num_bytes for each in made)

        return asyncio.run_coroutine_threadsafe(assemble(), self._loop).result(120)


def start_batcher(config: dict[str, Any]) -> Any:
    """Serve, and say how long the loop stood still since it was last asked."""
    loop = Loop(config["redis_url"])

    def work(message: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {"address": loop.address}
        if "on_loop" in message:
            answer["num_bytes"] = loop.assemble_on_loop(message["on_loop"])
            time.sleep(10 * TICK_S)  # until the tick after it has been noticed
        return answer | {"stalls_s": loop.longest_stalls_s()}

    return work


def start_producer(config: dict[str, Any]) -> Any:
    """Publish all groups of a run: one batch."""
    from turnstream.generator import Publisher

    groups = make_groups(config["groups"])

    def work(message: dict[str, Any]) -> dict[str, Any]:
        with Publisher(config["redis_url"], message["run"]) as publisher:
            for group in groups:
                publisher.publish(group)
        return {}

    return work


def start_consumer(config: dict[str, Any]) -> Any:
    """Pull the batch of a run."""
    from turnstream.worker import BatchStream

    def work(message: dict[str, Any]) -> dict[str, Any]:
        with BatchStream(config["address"], message["run"]) as stream:
            return {"num_bytes": next(iter(stream)).num_bytes}

    return work


ROLES = {"batcher": start_batcher, "producer": start_producer, "consumer": start_consumer}


# ------------------------------------------------------------------------------ rounds


@dataclass(frozen=True, slots=True)
class Round:
    """The longest stall of each kind, and the longest own part of one, in milliseconds."""

    idle_ms: float
    batcher_ms: float
    on_loop_ms: float
    idle_own_ms: float
    batcher_own_ms: float
    on_loop_own_ms: float
    num_bytes: int


class Bench:
    """The processes, used for every round."""

    def __init__(self, *, num_groups: int) -> None:
        from turnstream_server.embedded import EmbeddedServer

        self.num_groups = num_groups
        self.server = EmbeddedServer()
        self.server.start()
        common = {"redis_url": self.server.url, "groups": num_groups}
        self.batcher = Role(HERE, "batcher", common)
        self.producer = Role(HERE, "producer", common)
        self.consumer = Role(HERE, "consumer", common | {"address": self._ask()["address"]})

    def round(self, run: str) -> Round:
        """One batch through the batcher, and once more on its loop."""
        self._create_run(run)
        self._ask()
        time.sleep(0.5)
        idle = self._ask()
        self.consumer.send({"run": run})
        self.producer.send({"run": run})
        self.producer.receive()
        num_bytes = self.consumer.receive()["num_bytes"]
        batcher = self._ask()
        on_loop = self._ask(on_loop=run)
        if on_loop["num_bytes"] != num_bytes:
            raise RuntimeError(f"{on_loop['num_bytes']} bytes on the loop, {num_bytes} pulled")
        idle_ms, batcher_ms, on_loop_ms = (
            [1e3 * each_s for each_s in answer["stalls_s"]] for answer in (idle, batcher, on_loop)
        )
        return Round(
            idle_ms=idle_ms[0],
            batcher_ms=batcher_ms[0],
            on_loop_ms=on_loop_ms[0],
            idle_own_ms=idle_ms[1],
            batcher_own_ms=batcher_ms[1],
            on_loop_own_ms=on_loop_ms[1],
            num_bytes=num_bytes,
        )

    def _ask(self, **message: Any) -> dict[str, Any]:
        self.batcher.send(message)
        return self.batcher.receive()

    def _create_run(self, run: str) -> None:
        from turnstream.batching.config import BatchingConfig
        from turnstream.store.client.connection import connect
        from turnstream.store.run.runs import create_run

        config = BatchingConfig(batch_groups=self.num_groups, mini_batch_groups=self.num_groups)
        with connect(self.server.url) as client:
            create_run(client, run, config)

    def close(self) -> None:
        """Stop every process."""
        self.consumer.stop()
        self.producer.stop()
        self.batcher.stop()
        self.server.stop()


def main() -> None:
    """Measure, and print the longest stalls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small batch, to see that it works")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", choices=sorted(ROLES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        serve_role(ROLES[arguments.role])
        return
    sizes = TINY if arguments.tiny else FULL
    bench = Bench(num_groups=sizes["groups"])
    try:
        rounds = [bench.round(f"run {number}") for number in range(sizes["rounds"])]
    finally:
        bench.close()
    report(rounds)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(each) for each in rounds], indent=2))


def report(rounds: list[Round]) -> None:
    """Print medians and the worst of all rounds."""
    megabytes = rounds[0].num_bytes / 1e6
    print(f"longest stall of the batcher's event loop, a batch of {megabytes:.0f} MB, ms")
    print(f"{'':10} {'median':>8} {'worst':>8} {'own median':>12} {'own worst':>12}")
    for name in ("idle", "batcher", "on_loop"):
        found = [getattr(each, f"{name}_ms") for each in rounds]
        own = [getattr(each, f"{name}_own_ms") for each in rounds]
        print(
            f"{name.replace('_', ' '):10} {statistics.median(found):8.1f} {max(found):8.1f} "
            f"{statistics.median(own):12.1f} {max(own):12.1f}"
        )
    ratio = statistics.median([each.on_loop_ms / each.batcher_ms for each in rounds])
    median = statistics.median([each.batcher_ms for each in rounds])
    worst = max(each.batcher_own_ms for each in rounds)
    said = ["reached" if each < GOAL_MS else "missed" for each in (median, worst)]
    print(
        f"below {GOAL_MS:g} ms: the median {said[0]}, the worst by its own CPU time {said[1]}; "
        f"assembled on the loop it would be {ratio:.0f} times as long"
    )


if __name__ == "__main__":
    main()
