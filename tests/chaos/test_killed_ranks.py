"""Ranks under torchrun that are killed in a run of 20 steps, on a real store and batcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import redis
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import testkit
from testkit.services.batchers import BatcherThread
from turnstream.batching.config.batching_config import BatchingConfig
from turnstream.generator import Publisher
from turnstream.store.run.runs import close_run, create_run
from turnstream.types import Group, TrajectoryState
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.queries.ledger import read_ledger
from turnstream_server.models.policy import load_policy

pytestmark = [
    *(pytest.mark.redis, pytest.mark.grpc, pytest.mark.e2e),
    *(pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(900)),
]

NUM_STEPS = 20
CHECKPOINT_EVERY = 3

LORA = ("--parallel", "fsdp2", "--lora-rank", "4", "--layout", "packed")
LOSING: Final = [(0, "train.after_update@2"), (0, "checkpoint.after_weights")]
"""An update that is not acknowledged, and weights without their token: a step is trained again."""

# SIGTERM of one rank alone ends it too, and the others must not wait for it.
CASES: Final = {
    "ddp": (("--parallel", "ddp"), [*LOSING, (1, "after 17 0.061 SIGTERM")]),
    "fsdp2-lora": (LORA, [*LOSING, (1, "checkpoint.after_shards"), (1, "after 14 0.044 SIGTERM")]),
}
"""Options of the trainer; and for each start the killed rank and its place: harness.doomed_rank."""


class Training(NamedTuple):
    """A run whose steps are published, the folder of its trainer, and how the trainer starts."""

    folder: Path
    run: str
    words: Sequence[str]
    environment: dict[str, str]


@pytest.mark.parametrize("case", CASES)
def test_killed_ranks_resume_to_bit_equal_state_and_commit_once(case: str, tmp_path: Path) -> None:
    options, kills = CASES[case]
    with EmbeddedServer() as server, BatcherThread(server.url) as batcher:
        client = redis.Redis.from_url(server.url)
        targets = {"target": batcher.target, "url": server.url, "options": options}
        undisturbed = _prepare(client, "undisturbed", tmp_path, **targets)
        assert _launch(undisturbed, []) == 1
        disturbed = _prepare(client, "disturbed", tmp_path, **targets)
        num_starts = _launch(disturbed, kills)
        counts = [read_ledger(client, each.run).by_state for each in (undisturbed, disturbed)]
        client.close()

    assert num_starts == len(kills) + 1  # each kill took place
    for states in counts:
        committed = {TrajectoryState.COMMITTED: 4 * NUM_STEPS}
        assert {state: n for state, n in states.items() if n} == committed
    _assert_equal(_state(disturbed.folder), _state(undisturbed.folder))
    _assert_equal(_published(disturbed.folder), _published(undisturbed.folder))
    _check_metrics(_metrics(disturbed.folder), _metrics(undisturbed.folder))


def _prepare(
    client: redis.Redis, run: str, folder: Path, *, target: str, url: str, options: Sequence[str]
) -> Training:
    create_run(client, run, BatchingConfig(batch_groups=2, mini_batch_groups=1, max_staleness=1000))
    _publish(url, run)
    close_run(client, run)
    own, policy = folder / run, folder / "policy.json"
    policy.write_text(json.dumps({"vocab_size": 128, "hidden_size": 16, "num_layers": 2}))
    words = ["serve", "trainer", "--run", run, "--batcher", target, "--policy", str(policy)]
    words += ["--folder", str(own), "--learning-rate", "1e-2"]
    words += ["--checkpoint-every", str(CHECKPOINT_EVERY), *options]
    return Training(own, run, words, {"TURNSTREAM_REDIS_URL": url, "OMP_NUM_THREADS": "1"})


def _launch(training: Training, kills: Sequence[tuple[int, str]]) -> int:
    """Train with two ranks of a launcher until it has ended; return the number of its starts."""
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(len(kills))]
    words += ["--monitor-interval", "0.1", "-m", "--", "harness.doomed_rank", *training.words]
    environment = {
        **os.environ,
        **training.environment,
        "KILLS": json.dumps(kills),
        "FOLDER": str(training.folder),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return len((training.folder / "starts").read_text().splitlines())


def _publish(url: str, run: str) -> None:
    good = [testkit.turn("ab", "CD")]
    bad = [testkit.turn("ab", "EF"), testkit.turn("abefg", "H")]
    with Publisher(url, run) as publisher:
        for number in range(2 * NUM_STEPS):
            trajectories = (
                testkit.trajectory(*good, sample=0, reward=1.0),
                testkit.trajectory(*bad, sample=1, reward=number / NUM_STEPS),
            )
            publisher.publish(Group(group_id=f"g{number}", trajectories=trajectories))


def _state(folder: Path) -> dict[str, Any]:
    """Return weights, optimizer, counts and random numbers of the last checkpoint, flat."""
    newest = folder / f"checkpoints/step-{NUM_STEPS:08}"
    state = {"state": torch.load(newest / "state.pt", weights_only=True)}
    state["state"]["engine"].pop("base")  # a path in the folder of the launch
    if (newest / ".metadata").exists():
        dcp_to_torch_save(newest, folder / "whole.pt")
        state["shards"] = torch.load(folder / "whole.pt", weights_only=True)
    else:
        state["weights"] = dict(load_policy(newest).named_parameters())
    return dict(_flat(state, ""))


def _published(folder: Path) -> dict[str, Any]:
    newest = max(folder.glob("weights/v*"), key=lambda path: int(path.name[1:]))
    return dict(load_policy(newest).named_parameters())


def _flat(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(each, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for key, each in enumerate(value):
            yield from _flat(each, f"{name}/{key}")
    else:
        yield name, value


def _assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(expected) > 10
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        is_tensor = isinstance(value, Tensor)
        assert torch.equal(actual[name], value) if is_tensor else actual[name] == value, name


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _check_metrics(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """A repeated step has a line of its own, with the same loss and a new version."""
    assert [line["step"] for line in expected] == [*range(1, NUM_STEPS + 1)]
    losses = {line["step"]: line["loss"] for line in expected}
    assert {line["step"] for line in lines} == losses.keys()
    assert len(lines) > NUM_STEPS
    for line in lines:  # over both ranks
        assert line["loss"] == losses[line["step"]]
        assert (line["num_rows"], line["num_trajectories"]) == (4, 4)
    versions = [line["version"] for line in lines]
    assert versions == sorted(set(versions))
