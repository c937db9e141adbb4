"""The whole path, durable: producer -> store -> batcher -> consumer with padded torch tensors.

    make bench                                 # median of 5 rounds
    python benchmarks/pipeline.py --rounds 1 --groups 16      # a quick look

Every stage is a process of its own; CPU seconds are read from outside, from the moment both ends
are ready until the consumer holds every tensor, so process start and imports are left out. The
floor is measured in the same run: the same payload through the bare transports.

Then eight times the work goes through, in alternating rounds with the work itself. A second table,
"agentic", has trajectories of many small turns: see agentic.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import agentic
from processes import Role, cpu_of_work, cpu_seconds, peak_memory_mb, serve_role
from workload import (
    GROUP_SIZE,
    Checksum,
    checksum_groups,
    checksum_row,
    int64_bytes,
    make_groups,
)

HERE = Path(__file__)
GROUPS_PER_BATCH = 16
GROWTH = 8
GROWTH_GOAL = 8.4


# ------------------------------------------------------------------------------ roles


def start_producer(config: dict[str, Any]) -> Any:
    """Publish the groups of the workload one by one, as they finish."""
    from turnstream.generator import Publisher

    groups = make_groups(config["groups"])
    expected = asdict(checksum_groups(groups))

    def work(message: dict[str, Any]) -> dict[str, Any]:
        with Publisher(config["redis_url"], message["run"]) as publisher:
            for group in groups:
                publisher.publish(group)
            publisher.flush()
            sealed_s = time.monotonic()
            publisher.close_run("all groups published")
            wire_bytes = publisher.statistics().wire_bytes
        return {
            "checksum": expected,
            "wire_bytes": wire_bytes,
            "sealed_s": sealed_s,
            "is_closed": True,
        }

    return work


def start_consumer(config: dict[str, Any]) -> Any:
    """Pull every batch, hold it as padded tensors, acknowledge it."""
    import torch

    from turnstream.worker import BatchStream

    if config["torch_threads"]:
        torch.set_num_threads(config["torch_threads"])
    # The first tensor starts torch's allocator and threads: part of the start, not of the path.
    torch.zeros(1 << 20).clone()
    held: list[Any] = []

    def work(message: dict[str, Any]) -> dict[str, Any]:
        if "check" in message:
            return asdict(_checksum_tensors(held))
        held.clear()
        start_s, first_s = message["start_s"], 0.0  # monotonic clock
        with BatchStream(config["batcher"], message["run"]) as stream:
            for mini_batch in stream:
                held.append((mini_batch.to_torch(), torch.tensor(mini_batch.rows.reward)))
                first_s = first_s or time.monotonic()
                if mini_batch.is_last:
                    stream.stepped()
        return {"first_s": first_s, "wall_s": time.monotonic() - start_s}

    return work


def _checksum_tensors(batches: list[Any]) -> Checksum:
    total = Checksum(0, 0, 0, 0, 0.0)
    for tensors, reward_B in batches:
        lengths = tensors.attention_mask_BT.sum(1).tolist()
        responses = tensors.response_mask_BR.sum(1).tolist()
        for row, (num_tokens, num_response) in enumerate(zip(lengths, responses, strict=True)):
            total += checksum_row(
                tensors.input_ids_BT[row, -num_tokens:].numpy(),
                tensors.loss_mask_BR[row, -num_response:].numpy(),
                tensors.logprobs_BR[row, -num_response:].numpy(),
                float(reward_B[row]),
            )
    return total


def _start_role(name: str) -> Any:
    import floor

    return {
        "producer": start_producer,
        "agentic_producer": agentic.start_producer,
        "consumer": start_consumer,
        "floor_redis": floor.start_redis_floor,
        "floor_grpc_server": floor.start_grpc_server,
        "floor_grpc_client": floor.start_grpc_client,
        "floor_numpy": floor.start_numpy_copy,
    }[name]


# ------------------------------------------------------------------------------ rounds


@dataclass(frozen=True, slots=True)
class Round:
    """One run of the whole workload through all processes.

    Attributes:
        first_batch_s: from the start until the consumer has the first batch.
        after_seal_s: from the acknowledgement of the last seal until then; 0 in the agentic part.
    """

    cpu_s: dict[str, float]
    wall_s: float
    first_batch_s: float
    wire_bytes: int
    after_seal_s: float = 0.0

    @property
    def total_cpu_s(self) -> float:
        """CPU seconds over all processes."""
        return sum(self.cpu_s.values())


class Bench:
    """The processes of one configuration, used for every round.

    With `num_publishers`, so many processes append the turns of the agentic workload. Without, one
    process publishes whole groups.
    """

    def __init__(self, *, num_groups: int, torch_threads: int, num_publishers: int = 0) -> None:
        from turnstream_server.embedded import EmbeddedServer
        from turnstream_server.launch.stack import Stack

        self.num_groups = num_groups
        self.folder = tempfile.TemporaryDirectory()
        self.server = EmbeddedServer()
        self.server.start()
        self.stack = Stack(Path(self.folder.name), store_url=self.server.url)
        self.batcher = self.stack.start_batcher()
        role = "agentic_producer" if num_publishers else "producer"
        share = num_groups // max(num_publishers, 1)
        self.producers = [
            Role(HERE, role, {"redis_url": self.server.url, "groups": share, "first": first})
            for first in range(0, num_groups, share)
        ]
        self.consumer = Role(
            HERE, "consumer", {"batcher": self.batcher.address, "torch_threads": torch_threads}
        )

    @property
    def pids(self) -> dict[str, list[int]]:
        """Process ids by stage."""
        return {
            "producer": [each.pid for each in self.producers],
            "store": [self.server.pid],
            "batcher": [self.batcher.pid],
            "consumer": [self.consumer.pid],
        }

    def round(self, run: str) -> Round:
        """Stream the workload through a new run; the checksum must agree."""
        self._create_run(run)
        before = self._cpu_s()
        message = {"run": run, "start_s": time.monotonic()}
        for role in (self.consumer, *self.producers):
            role.send(message)
        produced = [producer.receive() for producer in self.producers]
        if not produced[0]["is_closed"]:
            self._close_run(run)
        consumed, after = self.consumer.receive(), self._cpu_s()
        cpu_s = {stage: after[stage] - before[stage] for stage in after}
        self.consumer.send({"check": True})
        sent = sum((Checksum(**each["checksum"]) for each in produced), Checksum(0, 0, 0, 0, 0.0))
        if (found := Checksum(**self.consumer.receive())) != sent:
            raise RuntimeError(f"checksum: sent {sent}, received {found}")
        wire_bytes = sum(each["wire_bytes"] for each in produced)
        first_s = consumed["first_s"]
        return Round(
            cpu_s,
            consumed["wall_s"],
            first_s - message["start_s"],
            wire_bytes,
            after_seal_s=first_s - produced[0].get("sealed_s", first_s),
        )

    def _cpu_s(self) -> dict[str, float]:
        return {stage: sum(map(cpu_seconds, pids)) for stage, pids in self.pids.items()}

    def _close_run(self, run: str) -> None:
        from turnstream.store.client.connection import connect
        from turnstream.store.run.runs import close_run

        with connect(self.server.url) as client:
            close_run(client, run, "all groups published")

    def _create_run(self, run: str) -> None:
        from turnstream.batching.config import BatchingConfig
        from turnstream.store.client.connection import connect
        from turnstream.store.run.runs import create_run

        steps = self.num_groups // GROUPS_PER_BATCH
        with connect(self.server.url) as client:
            create_run(
                client,
                run,
                BatchingConfig(
                    batch_groups=GROUPS_PER_BATCH,
                    mini_batch_groups=GROUPS_PER_BATCH,
                    max_staleness=steps,
                    max_planned_ahead=steps,
                ),
            )

    def peak_memory_mb(self) -> dict[str, float]:
        """Peak resident memory by stage."""
        return {stage: sum(map(peak_memory_mb, pids)) for stage, pids in self.pids.items()}

    def close(self) -> None:
        """Stop every process."""
        for producer in self.producers:
            producer.stop()
        self.consumer.stop()
        self.stack.stop()
        self.server.stop()
        self.folder.cleanup()


def measure_floor(
    redis_url: str, server_pid: int, *, num_records: int, num_bytes: int
) -> dict[str, float]:
    """CPU seconds of the bare transports for the same payload, by transport."""
    seconds = {}
    role = Role(
        HERE,
        "floor_redis",
        {
            "redis_url": redis_url,
            "num_records": num_records,
            "record_bytes": num_bytes // num_records,
        },
    )
    seconds["redis-py"] = _cpu_of_work(role, role.pid, server_pid)
    role.stop()
    server = Role(HERE, "floor_grpc_server", {"num_bytes": num_bytes})
    server.send({})
    client = Role(HERE, "floor_grpc_client", {"port": server.receive()["port"]})
    seconds["grpcio"] = _cpu_of_work(client, client.pid, server.pid)
    client.stop()
    server.stop()
    role = Role(HERE, "floor_numpy", {"num_bytes": num_bytes, "num_batches": 8})
    seconds["numpy"] = _cpu_of_work(role, role.pid)
    role.stop()
    return seconds


def _cpu_of_work(role: Role, *pids: int) -> float:
    return statistics.median(cpu_of_work([role], {}, pids)[0] for _ in range(5))


def measure_growth(*, num_groups: int, num_rounds: int) -> dict[str, float]:
    """Return the CPU seconds of the work, and of `GROWTH` times the work: medians."""
    benches = [Bench(num_groups=times * num_groups, torch_threads=1) for times in (1, GROWTH)]
    try:
        rounds = [
            [bench.round(f"growth-{index}").total_cpu_s for bench in benches]
            for index in range(num_rounds + 1)
        ]
    finally:
        for bench in benches:
            bench.close()
    once_s, grown_s = map(statistics.median, zip(*rounds[1:], strict=True))  # the first warms up
    return {"growth": GROWTH, "goal": GROWTH_GOAL, "once_s": once_s, "grown_s": grown_s}


# ------------------------------------------------------------------------------ report


def report(rounds: list[Round], memory_mb: dict[str, float], *, title: str) -> float:
    """Print the medians of some rounds; gives the median of the total CPU seconds."""
    total = statistics.median(r.total_cpu_s for r in rounds)
    wall = statistics.median(r.wall_s for r in rounds)
    first = statistics.median(r.first_batch_s for r in rounds)
    stages = "  ".join(
        f"{stage} {statistics.median(r.cpu_s[stage] for r in rounds):.3f}" for stage in memory_mb
    )
    print(f"{title} (median of {len(rounds)})")
    print(f"  CPU seconds, all processes   {total:.3f}   [{stages}]")
    print(f"  all rounds                   {' '.join(f'{r.total_cpu_s:.3f}' for r in rounds)}")
    print(f"  first batch after            {first:.3f} s")
    print(f"  end to end                   {wall:.3f} s")
    memory = "  ".join(f"{stage} {mb:.0f}" for stage, mb in memory_mb.items())
    print(f"  peak memory, MB              {sum(memory_mb.values()):.0f}   [{memory}]")
    return total


def main() -> None:
    """Run both thread settings and the floor, then the agentic part, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role")
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.role:
        serve_role(_start_role(arguments.role))
        return
    groups = make_groups(arguments.groups)
    num_bytes, num_rows = int64_bytes(groups), arguments.groups * GROUP_SIZE
    print(f"{num_rows} trajectories, {num_bytes / 1e6:.1f} MB with int64 ids\n")
    results: dict[str, Any] = {"trajectories": num_rows, "int64_bytes": num_bytes}
    floor_s = {}
    for threads, title in ((1, "one torch thread"), (0, "default torch threads")):
        bench = Bench(num_groups=arguments.groups, torch_threads=threads)
        try:
            bench.round(f"warm-up-{threads}")
            rounds = [bench.round(f"round-{threads}-{i}") for i in range(arguments.rounds)]
            total = report(rounds, bench.peak_memory_mb(), title=title)
            wall = statistics.median(r.wall_s for r in rounds)
            print(f"  trajectories/s               {num_rows / wall:.0f}")
            print(f"  bytes appended, MB           {rounds[0].wire_bytes / 1e6:.1f}")
            floor_s = floor_s or measure_floor(
                bench.server.url, bench.server.pid, num_records=num_rows, num_bytes=num_bytes
            )
        finally:
            bench.close()
        floor_total = sum(floor_s.values())
        print(f"  over the floor               {total / floor_total:.2f} x\n")
        results[title] = {"cpu_s": total, "wall_s": wall, "rounds": [asdict(r) for r in rounds]}
    print(f"floor, CPU seconds             {sum(floor_s.values()):.3f}   ", end="")
    print("[" + "  ".join(f"{name} {s:.3f}" for name, s in floor_s.items()) + "]\n")
    results["growth"] = measure_growth(num_groups=arguments.groups, num_rounds=arguments.rounds)
    times = results["growth"]["grown_s"] / results["growth"]["once_s"]
    print(f"{GROWTH} times the work             {times:.2f} times the CPU seconds\n")
    results["agentic"] = agentic.measure(
        Bench, num_groups=max(arguments.groups // 2, GROUPS_PER_BATCH), num_rounds=arguments.rounds
    )
    agentic.report(results["agentic"])
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results | {"floor_s": floor_s}, indent=2))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
