"""The example for Ray Train, on a real store and batcher, with workers that Ray starts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import testkit
import turnstream
from testkit.services.batchers import BatcherThread
from testkit.training.training import make_model
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import newest_version
from turnstream.types import Group, RecoveryToken, TrajectoryState
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.queries.ledger import read_ledger
from turnstream_server.models.policy import save_policy

pytestmark = [pytest.mark.redis, pytest.mark.grpc, pytest.mark.e2e]

EXAMPLE: Final = Path(__file__).parents[3] / "examples/ray_train.py"
GROUPS: Final = [f"g{number}" for number in range(8)]
LEARNING_RATE: Final = 1e-3


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A folder for the files of Ray, with a path that is short enough for its sockets."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(400)
def test_killed_ray_worker_resumes_to_weights_of_one_process(
    tmp_path: Path, ray_folder: Path
) -> None:
    save_policy(make_model(), tmp_path / "model")
    with EmbeddedServer() as server, BatcherThread(server.url), connect(server.url) as client:
        alone, shared = (_new_run(server.url, name) for name in ("alone", "shared"))
        _publish(alone, GROUPS)
        alone.close()
        _publish(shared, GROUPS[:6])
        output = tmp_path / "output.txt"
        with _example(server.url, ray_folder, output) as process:
            # Step 3 is acknowledged and in no checkpoint; the ranks wait for step 4.
            testkit.wait_until(
                lambda: process.poll() is not None or read_frontier(client, "shared").stepped == 3,
                200.0,
                "step 3",
            )
            frontier, started = read_frontier(client, "shared"), _descendants(process.pid)
            os.kill(_pids(started, "ray::RayTrainWorker")[-1], signal.SIGKILL)
            _publish(shared, GROUPS[6:])
            shared.close()
            assert process.wait(150) == 0, output.read_text()
        testkit.wait_until(lambda: not _running(started), describe="the end of all processes")
        expected, norm = _train_alone(alone, tmp_path / "model")
        counts = read_ledger(client, "shared").by_state
        announced = newest_version(client, "shared")

    assert (frontier.stepped, frontier.committed) == (3, 2)
    assert {state: n for state, n in counts.items() if n} == {TrajectoryState.COMMITTED: 24}
    metrics = json.loads(output.read_text().splitlines()[-1])
    assert (metrics["step"], metrics["num_groups"]) == (4, 2)
    assert norm > 0.1  # the last update is not clipped to 0
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert announced is not None
    assert (announced.version, announced.step) == (2, 4)
    trainer = torch.load(Path(announced.weights_uri, "trainer.pt"))
    assert RecoveryToken.parse(trainer["state"]).step == 4
    weights = load_file(Path(announced.weights_uri, "model.safetensors"))
    assert weights.keys() == expected.keys()
    torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-5)
    first = load_file(tmp_path / "model/model.safetensors")
    assert max((weights[name] - first[name]).abs().max() for name in weights) > LEARNING_RATE


def _new_run(url: str, name: str) -> turnstream.Run:
    """Two updates of one group in each step; a pass has room for one long row."""
    return turnstream.connect(url).create_run(
        name,
        batch_groups=2,
        mini_batch_groups=1,
        max_staleness=100,
        max_tokens_per_micro_batch=12,
    )


def _publish(run: turnstream.Run, names: Sequence[str]) -> None:
    """Groups of three, so that one of two ranks gets an inert row."""
    responses = ("CD", "EFGH", "IJKLMN")
    with run.publisher() as publisher:
        for name in names:
            turns = [testkit.turn("ab" + name, each, logprobs=-4.5) for each in responses]
            members = (
                testkit.trajectory(turn, sample=sample, reward=[1.0, 0.0, 0.25][sample])
                for sample, turn in enumerate(turns)
            )
            publisher.publish(Group(group_id=name, trajectories=tuple(members)))


@contextlib.contextmanager
def _example(url: str, ray_folder: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the example with two workers that may restart once; its files lie beside `output`."""
    folder = output.parent
    words = ["--run", "shared", "--model", str(folder / "model"), "--num-workers", "2"]
    words += ["--storage", str(folder / "results"), "--learning-rate", str(LEARNING_RATE)]
    words += ["--checkpoint-every", "2", "--max-failures", "1"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RAY_OVERRIDE_RESOURCES": '{"CPU": 2}',
        "RAY_TMPDIR": str(ray_folder),
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TURNSTREAM_REDIS_URL": url,
    }
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(EXAMPLE), *words]
    with (
        output.open("w") as file,
        subprocess.Popen(command, env=environment, stdout=file) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


def _descendants(pid: int) -> dict[int, str]:
    """Return the command of each process that a process has started, itself included."""
    lines = subprocess.run(
        ["ps", "axww", "-o", "pid=,ppid=,args="], capture_output=True, check=True, text=True
    ).stdout.splitlines()
    fields = [line.split(maxsplit=2) for line in lines]
    processes = [(int(own), int(parent), command) for own, parent, command in fields]
    found: dict[int, str] = {}
    wanted = {pid}
    while wanted:
        found |= {own: command for own, _, command in processes if own in wanted}
        wanted = {own for own, parent, _ in processes if parent in found} - found.keys()
    return found


def _pids(processes: dict[int, str], title: str) -> list[int]:
    return sorted(pid for pid, command in processes.items() if command.startswith(title))


def _running(processes: dict[int, str]) -> list[int]:
    return [pid for pid in processes if Path(f"/proc/{pid}").exists()]


def _train_alone(run: turnstream.Run, folder: Path) -> tuple[dict[str, Tensor], float]:
    """Return weights and last gradient norm of one process, with the loss of whole mini-batches."""
    model: Any = make_model()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    norm = 0.0
    with run.batches() as batches:
        for step in batches:
            for mini_batch in step:
                rows = mini_batch.to_torch()
                logits_BTV = model(
                    input_ids=rows.input_ids_BT,
                    attention_mask=rows.attention_mask_BT.long(),
                    position_ids=rows.position_ids_BT,
                ).logits.double()
                width = rows.loss_mask_BR.shape[1]
                sampled_BR = rows.input_ids_BT[:, -width:, None]
                logprobs_BTV = logits_BTV[:, -width - 1 : -1].log_softmax(-1)
                ratio_BR = (logprobs_BTV.gather(-1, sampled_BR)[..., 0] + 4.5).exp()
                gain_BR = torch.minimum(
                    ratio_BR * rows.advantages_BR, ratio_BR.clamp(0.8, 1.2) * rows.advantages_BR
                )
                optimizer.zero_grad()
                (-gain_BR[rows.loss_mask_BR].mean()).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
                optimizer.step()
            step.done()
    return {name: each.detach() for name, each in model.named_parameters()}, norm
