"""Ingest of the path's workload: over Redis, and over HTTP by the SDK, as JSON and as Arrow.

    make bench                           # with the others: the median of 5 rounds
    python benchmarks/ingest.py --tiny   # checks that it works

Client, gateway and store are processes of their own. CPU seconds are read from outside. They
include the encoding of the bodies, and end when every trajectory is acknowledged as sealed. The
rounds of all ways alternate in one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from processes import Role, cpu_seconds, serve_role
from workload import GROUP_SIZE, make_groups

HERE = Path(__file__)
LIMIT_TRAJECTORIES = 1_024
NUM_GROUPS = LIMIT_TRAJECTORIES // GROUP_SIZE


class Way(NamedTuple):
    """A way of trajectories into the store.

    Attributes:
        kind: "redis" or "http" for the SDK; "json" or "arrow" for bodies of the client.
        groups_per_body: groups of one request; 0 for the SDK, which decides itself.
        limit_s: most CPU seconds over all processes for LIMIT_TRAJECTORIES; 0 for no limit.
    """

    kind: str
    groups_per_body: int = 0
    limit_s: float = 0.0


WAYS = {
    "SDK over Redis": Way("redis"),
    "SDK over HTTP": Way("http"),
    "JSON, 8 groups a request": Way("json", 8, 3.0),
    "JSON, one group a request": Way("json", 1, 3.0),
    "Arrow, 8 groups a request": Way("arrow", 8, 1.5),
    "Arrow, one group a request": Way("arrow", 1, 1.5),
}


# ------------------------------------------------------------------------------ clients


def start_client(config: dict[str, Any]) -> Any:
    """Return the work of a client: all groups, into the run of a message, one way."""
    import httpx2

    from turnstream.generator import Publisher

    groups = make_groups(config["groups"])
    http = httpx2.Client(base_url=f"{config['http']}/v1/runs/", timeout=120)
    bodies = {"json": json_body, "arrow": arrow_body}

    def publish(url: str, run: str) -> None:
        with Publisher(url, run) as publisher:
            for group in groups:
                publisher.publish(group)
            publisher.flush()

    def post(way: Way, run: str) -> None:
        json_or_arrow = "json" if way.kind == "json" else "vnd.apache.arrow.stream"
        headers = {"Content-Type": f"application/{json_or_arrow}"}
        for start in range(0, len(groups), way.groups_per_body):
            body = bodies[way.kind](groups[start : start + way.groups_per_body])
            answer = http.post(f"{run}/trajectories", content=body, headers=headers)
            answer.raise_for_status()
            failed = [each for each in answer.json()["results"] if each["status"] != 201]
            if failed:
                raise RuntimeError(f"refused: {failed[:2]}")

    def work(message: dict[str, Any]) -> dict[str, Any]:
        way, run = WAYS[message["way"]], message["run"]
        start_s = time.monotonic()
        if way.groups_per_body:
            post(way, run)
        else:
            publish(config[way.kind], run)
        return {"wall_s": time.monotonic() - start_s}

    return work


def json_body(groups: list[Any]) -> bytes:
    """Return groups as JSON, by an encoder in native code."""
    import pydantic_core

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
        for group in groups
        for trajectory in group.trajectories
    ]
    return pydantic_core.to_json({"items": items})


def arrow_body(groups: list[Any]) -> bytes:
    """Return groups as an Arrow IPC stream, one row per turn."""
    import numpy as np
    import pyarrow as pa

    def lists(arrays: list[Any]) -> pa.ListArray:
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
        return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(arrays)))

    rows = [
        (group, trajectory, turn)
        for group in groups
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
    return sink.getvalue().to_pybytes()


# ------------------------------------------------------------------------------ rounds


class Bench:
    """Store, gateway and client, used for every round."""

    def __init__(self, *, num_groups: int) -> None:
        from turnstream_server.embedded import EmbeddedServer
        from turnstream_server.launch.stack import Stack

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
        arguments = {
            "redis": self.server.url,
            "http": f"http://{address}",
            "groups": num_groups,
        }
        self.client = Role(HERE, "client", arguments)

    def round(self, way: str, number: int) -> dict[str, float]:
        """Return the CPU seconds of one round by process, and its wall seconds."""
        run = f"{WAYS[way].kind}-{WAYS[way].groups_per_body}-{number}"
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
        from turnstream_server.ledger.queries.ledger import read_ledger

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


def measure(*, num_groups: int, num_rounds: int) -> dict[str, Any]:
    """Return the rounds of each way, and their medians; the first round is a warm-up."""
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
    num_trajectories = num_groups * GROUP_SIZE
    share = num_trajectories / LIMIT_TRAJECTORIES
    ways = {
        way: {
            "median_s": {
                name: statistics.median(each[name] for each in found) for name in found[0]
            },
            "limit_s": WAYS[way].limit_s * share or None,
            "rounds": found,
        }
        for way, found in rounds.items()
    }
    return {"trajectories": num_trajectories, "ways": ways}


def medians_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each column."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def report(found: dict[str, Any]) -> None:
    """Print one line per way."""
    native_s = found["ways"]["SDK over Redis"]["median_s"]["total"]
    print(f"{found['trajectories']} trajectories, CPU seconds of all processes, medians")
    for way, each in found["ways"].items():
        median_s, limit_s = each["median_s"], each["limit_s"]
        parts = "  ".join(f"{name} {median_s[name]:.3f}" for name in ("client", "gateway", "store"))
        goal = f"   at most {limit_s:.2f}" if limit_s else ""
        ratio = median_s["total"] / native_s
        print(f"  {way:28} {median_s['total']:7.3f}   {ratio:5.2f} x Redis   [{parts}]{goal}")


def main() -> None:
    """Measure, print one line per way, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="two groups, to check that it works")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        serve_role(start_client)
        return
    num_groups, num_rounds = (2, 1) if arguments.tiny else (NUM_GROUPS, arguments.rounds)
    found = measure(num_groups=num_groups, num_rounds=num_rounds)
    report(found)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
