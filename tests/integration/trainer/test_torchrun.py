"""The trainer under torchrun, on a real store and batcher."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from safetensors.torch import load_file

import testkit
from testkit.batchers import BatcherThread
from turnstream.generator import Publisher
from turnstream.store.run.runs import close_run, newest_version
from turnstream.types import Group, TrajectoryState
from turnstream_server.bus.queries.ledger import read_ledger
from turnstream_server.embedded import EmbeddedServer

pytestmark = [pytest.mark.redis, pytest.mark.grpc, pytest.mark.e2e]

GROUPS = [f"g{number}" for number in range(8)]


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """A server for each test: a batcher serves every run of its store."""
    with EmbeddedServer() as server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_rank_restarts_to_bit_equal_weights_and_commits_once(
    server: EmbeddedServer, client: redis.Redis, new_run: Callable[..., str], tmp_path: Path
) -> None:
    whole, broken = (new_run(client, batch_groups=2, max_staleness=100) for _ in range(2))
    _publish(server.url, whole, GROUPS)
    close_run(client, whole)
    _publish(server.url, broken, GROUPS[:6])

    with BatcherThread(server.url) as batcher:
        launch = functools.partial(_torchrun, batcher.target, server.url, tmp_path)
        with launch(whole) as undisturbed, launch(broken) as disturbed:
            # Step 3 is acknowledged and in no checkpoint; the ranks wait for step 4.
            testkit.wait_until(lambda: _has_step(3, tmp_path / broken, disturbed), 200.0, "step 3")
            os.kill(_process_of_rank(1, launcher=disturbed.pid), signal.SIGKILL)
            _publish(server.url, broken, GROUPS[6:])
            close_run(client, broken)
            assert [undisturbed.wait(120), disturbed.wait(120)] == [0, 0]

    assert [line["step"] for line in _metrics(tmp_path / whole)] == [1, 2, 3, 4]
    lines = _metrics(tmp_path / broken)
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4]
    assert [line["version"] for line in lines] == [1, 2, 3, 5, 6]
    assert lines[2]["loss"] == lines[3]["loss"]
    for line in lines:  # over both ranks
        assert (line["num_rows"], line["num_trajectories"], line["reward_mean"]) == (4, 4, 0.5)
        assert line["num_tokens"] == 2 * (4 + 6)
    for run in (whole, broken):
        counts = read_ledger(client, run).by_state
        assert {state: n for state, n in counts.items() if n} == {TrajectoryState.COMMITTED: 16}
    announced = newest_version(client, broken)
    assert announced is not None
    assert (announced.version, announced.step) == (6, 4)
    assert _weights(tmp_path / broken, 4) == _weights(tmp_path / whole, 4)
    assert _weights(tmp_path / broken, 4) != _weights(tmp_path / broken, 2)


def _publish(url: str, run: str, groups: Sequence[str]) -> None:
    """Groups of two: a short good answer, a longer bad one."""
    good = [testkit.turn("ab", "CD")]
    bad = [testkit.turn("ab", "EF"), testkit.turn("abefg", "H")]
    with Publisher(url, run) as publisher:
        for name in groups:
            trajectories = (
                testkit.trajectory(*good, sample=0, reward=1.0),
                testkit.trajectory(*bad, sample=1, reward=0.0),
            )
            publisher.publish(Group(group_id=name, trajectories=trajectories))


@contextlib.contextmanager
def _torchrun(target: str, url: str, folder: Path, run: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start two ranks that may restart once; yield their launcher."""
    policy = folder / f"{run}.json"
    policy.write_text(json.dumps({"vocab_size": 128, "hidden_size": 16, "num_layers": 1}))
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    words += [
        "-m",
        "--",
        "turnstream_server",
        "serve",
        "trainer",
        "--run",
        run,
        "--batcher",
        target,
    ]
    words += ["--policy", str(policy), "--folder", str(folder / run)]
    words += ["--learning-rate", "1e-2", "--checkpoint-every", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env={**os.environ, "TURNSTREAM_REDIS_URL": url},
    )
    try:
        yield process
    finally:
        process.terminate()  # the launcher ends its ranks
        process.wait(60)


def _has_step(step: int, folder: Path, launcher: subprocess.Popen[bytes]) -> bool:
    assert launcher.poll() is None
    return len(_metrics(folder)) == step


def _process_of_rank(rank: int, *, launcher: int) -> int:
    """Return the process id of a rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")


def _metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def _weights(folder: Path, step: int) -> dict[str, bytes]:
    tensors = load_file(folder / f"checkpoints/step-{step:08}/model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
