"""What a job asks of a service arrives there through its command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from turnstream_server import bootstrap, cli
from turnstream_server.generators.environments.preset import GuessingPreset
from turnstream_server.generators.live import LiveGeneratorConfig
from turnstream_server.generators.replay import ReplayConfig
from turnstream_server.jobs.services import start_service, write_policy
from turnstream_server.jobs.stack import Stack
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.trainer.config import OptimizerConfig, TrainerConfig

URL = "redis://me:hush@store:6379/0"
Start = Callable[..., Any]


class RecordingStack:
    """Keeps the command lines in place of starting processes."""

    def __init__(self) -> None:
        self.arguments: list[str] = []

    def start(self, _name: str, arguments: Sequence[str]) -> None:
        """Keep the arguments of `Stack.start`."""
        self.arguments = list(arguments)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """`start(kind, ...)` returns the config that the command line of a service makes."""
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", URL)
    configs: list[Any] = []

    def keep(_settings: object, config: object, **_store: object) -> int:
        configs.append(config)
        return 0

    for starter in ("start_trainer", "start_live_generator", "start_replay"):
        monkeypatch.setattr(bootstrap, starter, keep)

    def run(kind: str, *words: str, **options: object) -> Any:
        stack = RecordingStack()
        start_service(cast("Stack", stack), kind, "name", words, run="run", **options)
        assert not any("hush" in argument for argument in stack.arguments)
        result = CliRunner().invoke(cli.app, stack.arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return configs[-1]

    return run


def test_trainer_gets_the_options_of_its_job(start: Start, tmp_path: Path) -> None:
    policy = SmallModelSpec(vocab_size=20, hidden_size=8, seed=3)

    config = start(
        "trainer",
        batcher="127.0.0.1:7",
        policy=write_policy(tmp_path, policy),
        folder=tmp_path,
        learning_rate=0.002,
        timeout=90.0,
        dump=tmp_path / "dump",
    )

    assert config == TrainerConfig(
        run="run",
        batcher_target="127.0.0.1:7",
        policy=policy,
        folder=tmp_path,
        optimizer=OptimizerConfig(learning_rate=0.002),
        timeout_s=90.0,
        dump_folder=tmp_path / "dump",
    )


def test_replay_process_gets_the_options_of_its_job(start: Start, tmp_path: Path) -> None:
    config = start(
        "replayer",
        str(tmp_path / "a.jsonl"),
        writer="replay-1",
        tokenizer=tmp_path,
        shard=1,
        shards=3,
        groups=5,
        speed=2.5,
        logprobs_by=None,
    )

    assert config == ReplayConfig(
        redis_url=URL,
        run="run",
        writer="replay-1",
        recordings=tmp_path / "a.jsonl",
        tokenizer=tmp_path,
        shard=1,
        num_shards=3,
        max_groups=5,
        speed=2.5,
    )


def test_demo_services_have_the_preset_as_default(start: Start, tmp_path: Path) -> None:
    preset = GuessingPreset()

    trainer = start("trainer", preset="guessing", folder=tmp_path, seed=7)
    generator = start("generator", writer="live-1", round=16, seed=5)

    assert trainer.policy == preset.policy(seed=7)
    assert trainer.optimizer.learning_rate == preset.learning_rate
    assert trainer.objective.temperature == preset.temperature
    assert generator == LiveGeneratorConfig(
        redis_url=URL,
        run="run",
        writer="live-1",
        game=preset.game,
        group_size=preset.group_size,
        groups_per_round=16,
        temperature=preset.temperature,
        seed=5,
    )
