"""Ingest of the path's workload: over Redis, and over HTTP by the SDK, as JSON and as Arrow.

    python benchmarks/ingest.py                          # median of 5 rounds
    python benchmarks/ingest.py --rounds 1 --groups 4    # a quick look

Client, gateway and store are processes of their own. CPU seconds are read from outside. They
include the encoding of the bodies, and end when every trajectory is acknowledged as sealed. The
rounds of the four ways alternate in one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from processes import Role, cpu_seconds, serve_role
from workload import GROUP_SIZE, make_groups

HERE = Path(__file__)
WAYS = ("redis", "http", "json", "arrow")
GROUPS_PER_BODY = 8
LIMITS_S = {"json": 3.0, "arrow": 1.5}
"""CPU seconds over all processes for 1,024 trajectories."""


# ------------------------------------------------------------------------------ clients


def start_client(config: dict[str, Any]) -> Any:
    """Return the work of a client: all groups, into the run of a message, one way."""
    import httpx2

    from turnstream.generator import Publisher

    groups = make_groups(config["groups"])
    http = httpx2.Client(base_url=f"http://{config['gateway']}/v1/runs/", timeout=120)
    bodies = {"json": json_bodies, "arrow": arrow_bodies}

    def publish(url: str, run: str) -> None:
        with Publisher(url, run) as publisher:
            for group in groups:
                publisher.publish(group)
            publisher.flush()

    def post(way: str, run: str) -> None:
        kind = "application/json" if way == "json" else "application/vnd.apache.arrow.stream"
        for body in bodies[way](groups):
            answer = http.post(
                f"{run}/trajectories", content=body, headers={"Content-Type": kind}
            ).raise_for_status()
            failed = [each for each in answer.json()["results"] if each["status"] != 201]
            if failed:
                raise RuntimeError(f"refused: {failed[:2]}")

    def work(message: dict[str, Any]) -> dict[str, Any]:
        way, run = message["way"], message["run"]
        start_s = time.monotonic()
        if way in ("redis", "http"):
            publish(config["redis_url"] if way == "redis" else f"http://{config['gateway']}", run)
        else:
            post(way, run)
        return {"wall_s": time.monotonic() - start_s}

    return work


def json_bodies(groups: list[Any]) -> Iterator[bytes]:
    """Yield the bodies of the groups as JSON, by an encoder in native code."""
    import pydantic_core

    for start in range(0, len(groups), GROUPS_PER_BODY):
        items = [
            {
                "group_id": group.group_id,
                "prompt_uid": group.prompt_uid,
                "num_samples": len(group.trajectories),
                "sample": trajectory.sample,
                "turns": [
                    {
                        "prompt_ids": turn.prompt_ids.tolist(),
                        "response_ids": turn.response_ids.tolist(),
                        "logprobs": turn.logprobs.tolist(),
                        "loss_mask": turn.loss_mask.tolist(),
                    }
                    for turn in trajectory.turns
                ],
                "reward": trajectory.reward,
            }
            for group in groups[start : start + GROUPS_PER_BODY]
            for trajectory in group.trajectories
        ]
        yield pydantic_core.to_json({"items": items})


def arrow_bodies(groups: list[Any]) -> Iterator[bytes]:
    """Yield the bodies of the groups as Arrow IPC streams, one row per turn."""
    import numpy as np
    import pyarrow as pa

    def lists(arrays: list[Any]) -> pa.ListArray:
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
        return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(arrays)))

    for start in range(0, len(groups), GROUPS_PER_BODY):
        rows = [
            (group, trajectory, turn)
            for group in groups[start : start + GROUPS_PER_BODY]
            for trajectory in group.trajectories
            for turn in trajectory.turns
        ]
        turns = [turn for _, _, turn in rows]
        columns = {
            "group_id": pa.array([group.group_id for group, _, _ in rows]),
            "prompt_uid": pa.array([group.prompt_uid for group, _, _ in rows]),
            "num_samples": pa.array([len(group.trajectories) for group, _, _ in rows]),
            "sample": pa.array([trajectory.sample for _, trajectory, _ in rows]),
            "reward": pa.array([trajectory.reward for _, trajectory, _ in rows]),
            "prompt_ids": lists([turn.prompt_ids for turn in turns]),
            "response_ids": lists([turn.response_ids for turn in turns]),
            "logprobs": lists([turn.logprobs for turn in turns]),
            "loss_mask": lists([turn.loss_mask for turn in turns]),
        }
        batch = pa.record_batch(columns)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield sink.getvalue().to_pybytes()


# ------------------------------------------------------------------------------ rounds


class Bench:
    """Store, gateway and client, used for every round."""

    def __init__(self, *, num_groups: int) -> None:
        from turnstream_server.embedded import EmbeddedServer
        from turnstream_server.jobs.stack import Stack

        self.num_groups = num_groups
        self.folder = tempfile.TemporaryDirectory()
        self.server = EmbeddedServer()
        self.server.start()
        self.stack = Stack(Path(self.folder.name), store_url=self.server.url)
        address_file = Path(self.folder.name) / "gateway.address"
        self.gateway = self.stack.start(
            "gateway", "gateway", listen="127.0.0.1:0", address_file=address_file
        )
        address = self.stack.wait_for_file(address_file, of=self.gateway, timeout_s=60)
        arguments = {"redis_url": self.server.url, "gateway": address, "groups": num_groups}
        self.client = Role(HERE, "client", arguments)

    def round(self, way: str, number: int) -> dict[str, float]:
        """Return the CPU seconds of one round by process, and its wall seconds."""
        run = f"{way}-{number}"
        self._create_run(run)
        pids = {"client": self.client.pid, "gateway": self.gateway.pid, "store": self.server.pid}
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        self.client.send({"way": way, "run": run})
        wall_s = self.client.receive()["wall_s"]
        found = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        self._check(run)
        return {**found, "total": sum(found.values()), "wall": wall_s}

    def _create_run(self, run: str) -> None:
        from turnstream.batching.config import BatchingConfig
        from turnstream.store.client.connection import connect
        from turnstream.store.run.runs import create_run

        num = self.num_groups
        with connect(self.server.url) as client:
            create_run(client, run, BatchingConfig(batch_groups=num, mini_batch_groups=num))

    def _check(self, run: str) -> None:
        from turnstream.store.client.connection import connect
        from turnstream.types import TrajectoryState
        from turnstream_server.bus.queries.ledger import read_ledger

        with connect(self.server.url) as client:
            sealed = read_ledger(client, run).by_state[TrajectoryState.SEALED]
        if sealed != self.num_groups * GROUP_SIZE:
            raise RuntimeError(f"{run}: {sealed} trajectories are sealed")

    def close(self) -> None:
        """Stop every process."""
        self.client.stop()
        self.stack.stop()
        self.server.stop()
        self.folder.cleanup()


def measure(*, num_groups: int, num_rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the rounds of each way; the first round of each is a warm-up and left out."""
    bench = Bench(num_groups=num_groups)
    try:
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(num_rounds + 1):
            for way in WAYS:
                found = bench.round(way, number)
                if number:
                    rounds[way].append(found)
    finally:
        bench.close()
    return rounds


def main() -> None:
    """Measure, print one line per way, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role")
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.role:
        serve_role(lambda config: start_client(config))
        return
    rounds = measure(num_groups=arguments.groups, num_rounds=arguments.rounds)
    medians = {
        way: {name: statistics.median(each[name] for each in found) for name in found[0]}
        for way, found in rounds.items()
    }
    num_trajectories = arguments.groups * GROUP_SIZE
    print(f"{num_trajectories} trajectories, CPU seconds, median of {arguments.rounds}")
    for way, found in medians.items():
        ratio = found["total"] / medians["redis"]["total"]
        parts = "  ".join(f"{name} {found[name]:.3f}" for name in ("client", "gateway", "store"))
        limit = LIMITS_S.get(way, 0.0) * num_trajectories / 1024
        goal = f"   at most {limit:.2f}" if limit else ""
        print(f"  {way:6} {found['total']:7.3f}   {ratio:5.2f} x redis   [{parts}]{goal}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        results = {"trajectories": num_trajectories, "medians": medians, "rounds": rounds}
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
