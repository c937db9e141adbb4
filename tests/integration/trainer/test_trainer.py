"""The trainer on a real store and batcher."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

import testkit
from testkit.services.batchers import BatcherThread
from testkit.services.forked import popen
from testkit.services.inference_servers import VllmDouble, serving
from testkit.services.receivers import tensorboard_scalars
from turnstream.errors import InvalidConfigError
from turnstream.generator import Publisher
from turnstream.store.run.runs import close_run, newest_version
from turnstream.types import Group, RecoveryToken, TrajectoryState
from turnstream_server.console.results import find_metrics
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.queries.ledger import read_ledger
from turnstream_server.models.policy import load_policy
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.trainer import publishing
from turnstream_server.trainer.checkpoint import Checkpoint, Checkpoints
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.reporting.sinks import read_steps
from turnstream_server.trainer.service import train

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

POLICY = SmallModelSpec(vocab_size=128, hidden_size=16, num_layers=1)


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """A server for each test: a batcher serves every run of its store."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def batcher(server: EmbeddedServer) -> Iterator[str]:
    """The address of a batcher."""
    torch.set_num_threads(1)
    with BatcherThread(server.url) as batcher:
        yield batcher.target


def _config(batcher: str, run: str, folder: Path, **changes: Any) -> TrainerConfig:
    fields = {"checkpoint_every": 2, "timeout_s": 60.0, **changes}
    return TrainerConfig(
        run=run,
        batcher_target=batcher,
        small_model=POLICY,
        folder=folder,
        learning_rate=1e-2,
        **fields,
    )


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "lora_rank": 2,
            "layout": "packed",
            "loss": "kl_cov:share=0.2",
            "correction": ["tis", "mis:low=0.1,high=9"],
            "kl": "k1:place=reward,target=1e-3,horizon=8",
            "entropy_bonus": 0.01,
            "denominators": "recount",
            "critic": "policy:learning_rate=1e-2",
        },
    ],
    ids=["default", "all parts"],
)
def test_trainer_killed_after_stepped_repeats_the_batches_to_equal_weights(
    options: dict[str, Any],
    server: EmbeddedServer,
    client: redis.Redis,
    new_run: Callable[..., str],
    batcher: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = [f"g{number}" for number in range(8)]
    estimator = "gae" if "critic" in options else "grpo"
    settings = {"batch_groups": 2, "max_staleness": 100, "estimator": estimator}
    whole, broken = (new_run(client, **settings) for _ in range(2))
    for run in (whole, broken):
        _publish(server.url, run, groups)
        close_run(client, run)

    train(_config(batcher, whole, tmp_path / "whole", epochs=2, **options))
    config = _config(batcher, broken, tmp_path / "broken", epochs=2, tensorboard=True, **options)
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", _dying_at_step(4))
        with pytest.raises(_KilledError):
            train(config)
    before = read_ledger(client, broken).by_state
    train(config)

    announced = newest_version(client, whole)
    assert announced is not None
    assert (announced.version, announced.step) == (4, 4)
    assert before[TrajectoryState.COMMITTED] == before[TrajectoryState.STEPPED] == 8
    assert read_ledger(client, broken).by_state[TrajectoryState.COMMITTED] == 16
    lines = _metrics(tmp_path / "broken")
    assert {line["reward_mean"] for line in lines} == {0.5}
    assert (lines[0]["num_rows"], lines[0]["num_trajectories"]) == (4, 4)
    assert lines[0]["num_updates"] == 2
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 3, 4]
    # Version 5 names the weights of step 2 again: 3 and 4 stay taken.
    assert [line["version"] for line in lines] == [1, 2, 3, 4, 6, 7]
    later = [1, 2, 6, 7]
    assert [line["loss"] for line in lines[2:4]] == [line["loss"] for line in lines[4:]]
    # Every receiver shows the later line of each step alone.
    assert find_metrics(broken, redis_url=server.url) == tmp_path / "broken/metrics.jsonl"
    assert [line["version"] for line in read_steps(tmp_path / "broken/metrics.jsonl")] == later
    assert tensorboard_scalars(tmp_path / "broken/tensorboard", "progress/version") == [
        *enumerate(later, start=1)
    ]
    for expected, actual in zip(
        _weights(tmp_path / "whole"), _weights(tmp_path / "broken"), strict=True
    ):
        assert torch.equal(expected, actual)
    if "critic" in options:
        critics = [_critic_weights(tmp_path / name) for name in ("whole", "broken")]
        assert all(map(torch.equal, *critics))


def test_trainer_killed_before_a_push_pushes_the_newest_version_after_its_restart(
    server: EmbeddedServer,
    client: redis.Redis,
    new_run: Callable[..., str],
    batcher: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = new_run(client, batch_groups=2, max_staleness=100)
    _publish(server.url, run, [f"g{number}" for number in range(8)])
    close_run(client, run)
    double = VllmDouble()

    with serving(double.app()) as url:
        config = _config(batcher, run, tmp_path, push=[f"vllm={url}"])
        with monkeypatch.context() as patched:
            patched.setattr(publishing, "failpoint", _dying_at("publish.before_push", count=4))
            with pytest.raises(_KilledError):
                train(config)
        before = (newest_version(client, run), double.weight_version)
        train(config)

    assert before[0] is not None
    assert (before[0].version, before[1]) == (2, "2")
    announced = newest_version(client, run)
    assert announced is not None
    assert double.weight_version == str(announced.version)
    assert Path(double.weights).as_uri() == announced.weights_uri
    pushed = load_policy(Path(double.weights)).state_dict().values()
    assert all(map(torch.equal, pushed, _weights(tmp_path)))
    assert {line["num_servers_behind"] for line in _metrics(tmp_path)} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_trainer_process_ends_well_on_sigterm_and_leaves_nothing_half_written(
    server: EmbeddedServer,
    client: redis.Redis,
    new_run: Callable[..., str],
    batcher: str,
    tmp_path: Path,
) -> None:
    """Takes more than 5 s: a trainer starts with torch, and trains until its end."""
    run = new_run(client, batch_groups=2, max_staleness=100)
    _publish(server.url, run, ["g1", "g2"])
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"vocab_size": 128, "hidden_size": 16, "num_layers": 1}))
    folder = tmp_path / "trainer"
    arguments = ["--run", run, "--batcher", batcher, "--policy", policy, "--folder", folder]
    process = popen(
        [sys.executable, "-m", "turnstream_server.cli", "serve", "trainer", *map(str, arguments)],
        env={**os.environ, "TURNSTREAM_REDIS_URL": server.url},
    )
    try:
        metrics = folder / "metrics.jsonl"
        testkit.wait_until(lambda: metrics.exists() and metrics.read_text(), 200.0, "step 1")

        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    finally:
        process.kill()
        process.wait()

    assert status == 0
    names = {path.name for path in folder.rglob("*") if path.is_dir()}
    assert not {name for name in names if name.startswith(".")}
    assert Checkpoints(folder / "checkpoints").newest() is None
    assert read_ledger(client, run).by_state[TrajectoryState.STEPPED] == 4


def test_run_without_weights_in_a_folder_has_no_file_of_metrics(
    server: EmbeddedServer, client: redis.Redis, new_run: Callable[..., str]
) -> None:
    run = new_run(client, batch_groups=2)

    assert find_metrics(run, redis_url=server.url) is None
    with pytest.raises(InvalidConfigError, match="'other' is neither a folder nor a run of redis"):
        find_metrics("other", redis_url=server.url)


class _KilledError(BaseException):
    """Stands for the end of the process."""


def _dying_at(name: str, *, count: int) -> Callable[[str], None]:
    """`failpoint`, but the process ends when it is at a place for the n-th time."""
    passes = itertools.count(1)

    def reach_or_die(reached: str) -> None:
        if reached == name and next(passes) == count:
            raise _KilledError

    return reach_or_die


def _dying_at_step(step: int) -> Callable[..., Checkpoint]:
    """`Checkpoints.save`, but the process ends when it should save this step."""
    save = Checkpoints.save

    def save_or_die(self: Checkpoints, engine: Engine, token: RecoveryToken) -> Checkpoint:
        if token.step == step:
            raise _KilledError
        return save(self, engine, token)

    return save_or_die


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _critic_weights(folder: Path) -> list[torch.Tensor]:
    newest = Checkpoints(folder / "checkpoints").newest()
    assert newest is not None
    state = torch.load(newest.folder / "state.pt", weights_only=True)
    return list(state["engine"]["critic"]["model"].values())


def _weights(folder: Path) -> list[torch.Tensor]:
    newest = Checkpoints(folder / "checkpoints").newest()
    assert newest is not None
    return list(load_policy(newest.folder).state_dict().values())
