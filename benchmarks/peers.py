"""The whole path beside TransferQueue's newest release, in alternating rounds of one run.

    make bench                          # with the others
    python benchmarks/peers.py --tiny   # checks that it works

The release is installed into .venv-peers from the package index, with torch 2.13.0 without CUDA.
Both sides move the workload of pipeline.py from a producer to a consumer with padded tensors. Each
is a process with one torch thread, and the checksums must agree. Ours is durable and plans whole
groups; TransferQueue keeps its rows in memory.

Calls of the peer, and the reason for each:

- `TransferQueueClient.put` without metadata, a group of 8 rows at a time. It takes one request to
  the controller for the indexes, where `kv_batch_put` also registers a key for each row. "bulk" is
  one such call with all rows: nearly all of its cost is fixed for a call.
- `torch.nested.nested_tensor_from_jagged` over concatenated columns for the ragged fields: it
  copies nothing. Ids are int32, half of the bytes of int64, and become int64 in the padded tensor.
- `get_meta` with `GRPOGroupNSampler` and `polling_mode`: the controller answers at once. Without
  polling it sleeps in whole seconds inside the request, so that no put is served. An empty answer
  is repeated after 50 ms.
- `get_data`, then `torch.nested.to_padded_tensor`, the one call that pads all rows of a field.
- One storage unit, without metrics: a second unit on the same machine divides every request in two.

CPU seconds count all processes of a side, for Ray also its own: they are found by a variable in
their environment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pipeline
from processes import Role, cpu_seconds, peak_memory_mb, serve_role
from workload import GROUP_SIZE, Checksum, checksum_groups, checksum_row, make_groups

HERE = Path(__file__)
ROOT = HERE.parents[1]
ENVIRONMENT = ROOT / ".venv-peers"
PACKAGE = "TransferQueue"
TORCH = "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
MARK = "TURNSTREAM_BENCHMARK_PEER"
ROWS_PER_BATCH = pipeline.GROUPS_PER_BATCH * GROUP_SIZE
FIELDS = ("input_ids", "loss_mask", "logprobs", "reward")
WAYS = ("streaming", "bulk")
EMPTY_S = 0.05
GOALS = {"streaming": 4.5, "bulk": 1.2}


def install() -> str:
    """Install the newest release of the peer; return its version."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ENVIRONMENT / "constraints.txt"
    constraints.write_text(f"{TORCH}\n")
    # torch goes alone and first: the dependencies of a build with CUDA are never installed.
    index = ["--retries", "2", "--extra-index-url", TORCH_INDEX]
    has_torch = subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0
    if not has_torch:
        subprocess.run([*pip, "--no-deps", *index, TORCH], check=True)
    probe = "import importlib.metadata as m; print('+cpu' in m.version('torch'))"
    if "True" not in subprocess.run([python, "-c", probe], capture_output=True, text=True).stdout:
        raise RuntimeError(f"{ENVIRONMENT} has torch with CUDA: delete it, name an index without")
    subprocess.run([*pip, "--upgrade", "--constraint", constraints, PACKAGE], check=True)
    probe = f"import importlib.metadata as m; print(m.version({PACKAGE!r}))"
    return subprocess.run(
        [python, "-c", probe], capture_output=True, check=True, text=True
    ).stdout.strip()


# ------------------------------------------------------------------------------ roles of the peer


def start_host(config: dict[str, Any]) -> Any:
    """Start Ray, the controller and one storage unit; return the address of Ray."""
    import ray
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        _node_ip_address="127.0.0.1",
        _temp_dir=config["folder"],
    )
    settings = {
        "controller": {
            "sampler": tq.GRPOGroupNSampler(n_samples_per_prompt=GROUP_SIZE),
            "polling_mode": True,
        },
        "backend": {"SimpleStorage": {"num_data_storage_units": 1}},
    }
    tq.init(OmegaConf.create(settings, flags={"allow_objects": True}))
    address = ray.get_runtime_context().gcs_address

    def work(message: dict[str, Any]) -> dict[str, Any]:
        if "clear" in message:
            tq.get_client().clear_partition(message["clear"])
        return {"address": address}

    return work


def _attached(address: str) -> Any:
    """Return the client of a process that joins the host."""
    import ray
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]

    ray.init(address=address, log_to_driver=False)
    tq.init()
    return tq.get_client()


def start_peer_producer(config: dict[str, Any]) -> Any:
    """Put the groups of the workload one by one, or all at once."""
    import numpy as np
    import torch
    from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    groups = make_groups(config["groups"])
    expected = asdict(checksum_groups(groups))
    client = _attached(config["address"])

    def jagged(arrays: list[Any], lengths: list[int]) -> Any:
        offsets = torch.from_numpy(np.cumsum([0, *lengths]))
        values = torch.from_numpy(np.concatenate(arrays))
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    def put(run: str, trajectories: list[Any]) -> None:
        turns = [trajectory.turns[0] for trajectory in trajectories]
        sizes = [len(turn.response_ids) for turn in turns]
        fields = {
            "input_ids": jagged(
                [ids for turn in turns for ids in (turn.prompt_ids, turn.response_ids)],
                [len(turn.prompt_ids) + size for turn, size in zip(turns, sizes, strict=True)],
            ),
            "loss_mask": jagged([turn.loss_mask for turn in turns], sizes),
            "logprobs": jagged([turn.logprobs for turn in turns], sizes),
            "reward": torch.tensor([[each.reward] for each in trajectories]),
        }
        client.put(TensorDict(fields, batch_size=len(turns)), partition_id=run)

    def work(message: dict[str, Any]) -> dict[str, Any]:
        members = [[*group.trajectories] for group in groups]
        if message["way"] == "bulk":
            members = [[each for group in members for each in group]]
        for each in members:
            put(message["run"], each)
        return {"checksum": expected}

    return work


def start_peer_consumer(config: dict[str, Any]) -> Any:
    """Get every batch as soon as it is there, and hold it as padded tensors."""
    import torch

    torch.set_num_threads(1)
    torch.zeros(1 << 20).clone()
    client = _attached(config["address"])
    num_batches = config["groups"] // pipeline.GROUPS_PER_BATCH
    held: list[dict[str, Any]] = []

    def padded(data: Any) -> dict[str, Any]:
        ids = data["input_ids"]
        lengths = ids.offsets().diff()
        input_ids = torch.nested.to_padded_tensor(ids, 0).long()
        attention = torch.arange(input_ids.shape[1]) < lengths[:, None]
        rest = {name: torch.nested.to_padded_tensor(data[name], 0) for name in FIELDS[1:3]}
        sizes = data["loss_mask"].offsets().diff()
        return {
            "input_ids": input_ids,
            "attention_mask": attention,
            "reward": data["reward"],
            **rest,
            "lengths": lengths,
            "sizes": sizes,
        }

    def get(run: str) -> Any:
        while True:
            meta = client.get_meta([*FIELDS], ROWS_PER_BATCH, run, task_name="train")
            if meta.size:
                return client.get_data(meta)
            time.sleep(EMPTY_S)

    def work(message: dict[str, Any]) -> dict[str, Any]:
        if "check" in message:
            return asdict(_checksum(held))
        held.clear()
        start_s, first_s = message["start_s"], 0.0
        for _ in range(num_batches):
            held.append(padded(get(message["run"])))
            first_s = first_s or time.monotonic() - start_s
        return {"first_s": first_s, "wall_s": time.monotonic() - start_s}

    return work


def _checksum(batches: list[dict[str, Any]]) -> Checksum:
    total = Checksum(0, 0, 0, 0, 0.0)
    for each in batches:
        for row, (length, size) in enumerate(
            zip(each["lengths"].tolist(), each["sizes"].tolist(), strict=True)
        ):
            total += checksum_row(
                each["input_ids"][row, :length].numpy(),
                each["loss_mask"][row, :size].numpy(),
                each["logprobs"][row, :size].numpy(),
                float(each["reward"][row]),
            )
    return total


ROLES = {
    "host": start_host,
    "peer_producer": start_peer_producer,
    "peer_consumer": start_peer_consumer,
}


# ------------------------------------------------------------------------------ rounds


class Peer:
    """The processes of TransferQueue and Ray, used for every round."""

    def __init__(self, *, num_groups: int) -> None:
        # Short, because Ray puts sockets there.
        self.folder = tempfile.TemporaryDirectory(prefix="tq", ignore_cleanup_errors=True)
        self.mark = uuid.uuid4().hex
        paths = [ROOT / "clients" / "python" / "src", HERE.parent]
        environment = {
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TQ_NUM_THREADS": "1",
        }
        python = str(ENVIRONMENT / "bin" / "python")
        common: dict[str, Any] = {"groups": num_groups, "environment": environment}
        start = {"folder": self.folder.name, **common}
        self.host = Role(HERE, "host", start, python=python)
        self.host.send({})
        common["address"] = self.host.receive()["address"]
        self.producer = Role(HERE, "peer_producer", common, python=python)
        self.consumer = Role(HERE, "peer_consumer", common, python=python)

    def round(self, run: str, way: str) -> dict[str, float]:
        """Return CPU seconds of all processes, and seconds until the first and the last batch."""
        before = {pid: cpu_seconds(pid) for pid in self.pids()}
        message = {"run": run, "way": way, "start_s": time.monotonic()}
        self.consumer.send(message)
        self.producer.send(message)
        expected, consumed = self.producer.receive()["checksum"], self.consumer.receive()
        cpu_s = sum(cpu_seconds(pid) - before.get(pid, 0.0) for pid in self.pids())
        self.consumer.send({"check": True})
        if (found := self.consumer.receive()) != expected:
            raise RuntimeError(f"checksum of the peer: sent {expected}, received {found}")
        self.host.send({"clear": run})
        self.host.receive()
        return {"cpu_s": cpu_s, **consumed}

    def pids(self) -> list[int]:
        """Return all processes that inherited the mark."""
        mark, found = f"{MARK}={self.mark}".encode(), list[int]()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def memory_mb(self) -> float:
        """Return the sum of the peaks of resident memory."""
        return sum(map(peak_memory_mb, self.pids()))

    def close(self) -> None:
        """Stop every process."""
        for role in (self.consumer, self.producer, self.host):
            role.stop()
        self.folder.cleanup()


def measure(*, num_groups: int, num_rounds: int) -> dict[str, Any]:
    """Return the medians of alternating rounds of ours and of each way of the peer."""
    version = install()
    peer = Peer(num_groups=num_groups)
    ours = pipeline.Bench(num_groups=num_groups, torch_threads=1)
    try:
        rounds: dict[str, list[dict[str, float]]] = {each: [] for each in ("ours", *WAYS)}
        for number in range(num_rounds + 1):
            each = ours.round(f"run-{number}")
            found = {
                "ours": {
                    "cpu_s": each.total_cpu_s,
                    "first_s": each.first_batch_s,
                    "wall_s": each.wall_s,
                },
                **{way: peer.round(f"{way}-{number}", way) for way in WAYS},
            }
            if number:
                for name, values in found.items():
                    rounds[name].append(values)
        memory_mb = {"ours": sum(ours.peak_memory_mb().values()), "peer": peer.memory_mb()}
    finally:
        ours.close()
        peer.close()
    return {
        "version": version,
        "trajectories": num_groups * GROUP_SIZE,
        "goals": GOALS,
        "memory_mb": memory_mb,
        "ways": {
            name: {key: statistics.median(each[key] for each in values) for key in values[0]}
            for name, values in rounds.items()
        },
        "times": {
            way: statistics.median(
                theirs["cpu_s"] / each["cpu_s"]
                for theirs, each in zip(rounds[way], rounds["ours"], strict=True)
            )
            for way in WAYS
        },
    }


def main() -> None:
    """Measure, print one line for each side and way, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="16 groups, to check that it works")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", choices=[*ROLES], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        serve_role(ROLES[arguments.role])
        return
    num_groups, num_rounds = (16, 1) if arguments.tiny else (128, arguments.rounds)
    found = measure(num_groups=num_groups, num_rounds=num_rounds)
    print(f"{found['trajectories']} trajectories, {PACKAGE} {found['version']}, medians")
    for name, each in found["ways"].items():
        times = f"{found['times'][name]:6.2f} x ours" if name in WAYS else ""
        memory = found["memory_mb"].get(name, found["memory_mb"]["peer"])
        print(
            f"  {name:10} {each['cpu_s']:7.3f} CPU s  first batch {each['first_s']:6.3f} s  "
            f"all {each['wall_s']:6.3f} s  {memory:6.0f} MB {times}"
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
