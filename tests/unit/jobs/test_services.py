"""What a job asks of a service arrives there through its command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from turnstream_server import bootstrap, cli
from turnstream_server.generators.environments.guessing import GuessingGame
from turnstream_server.generators.environments.preset import GuessingPreset
from turnstream_server.generators.replay import ReplayConfig
from turnstream_server.jobs.services import start_live_generator, start_replay, start_trainer
from turnstream_server.jobs.stack import Stack
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.trainer.config import ObjectiveConfig, OptimizerConfig, TrainerConfig

URL = "redis://store:6379/0"


class RecordingStack:
    """Keeps the command lines in place of starting processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arguments: list[str] = []

    def start(self, _name: str, arguments: Sequence[str]) -> None:
        """What Stack.start is told."""
        self.arguments = list(arguments)


@pytest.fixture
def stack(tmp_path: Path) -> RecordingStack:
    return RecordingStack(tmp_path)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, RecordingStack], Any]:
    """`received(function of bootstrap, stack)` gives the config that the command line makes."""
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", URL)
    configs: list[Any] = []

    def keep(_settings: object, config: object, **_store: object) -> int:
        configs.append(config)
        return 0

    def run(starter: str, stack: RecordingStack) -> Any:
        monkeypatch.setattr(bootstrap, starter, keep)
        result = CliRunner().invoke(cli.app, stack.arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return configs[-1]

    return run


def test_a_trainer_gets_the_config_of_its_job(
    stack: RecordingStack, received: Callable[..., Any], tmp_path: Path
) -> None:
    config = TrainerConfig(
        run="run",
        batcher_target="127.0.0.1:7",
        policy=SmallModelSpec(vocab_size=20, hidden_size=8, seed=3),
        folder=tmp_path / "trainer",
        optimizer=OptimizerConfig(learning_rate=0.002, num_warmup_updates=5),
        objective=ObjectiveConfig(temperature=0.7),
        checkpoint_every=7,
        max_steps=9,
        num_threads=1,
        seed=11,
        timeout_s=90.0,
        dump_folder=tmp_path / "dump",
    )

    start_trainer(cast("Stack", stack), config)

    assert received("start_trainer", stack) == config


def test_a_replay_process_gets_the_config_of_its_job(
    stack: RecordingStack, received: Callable[..., Any], tmp_path: Path
) -> None:
    config = ReplayConfig(
        redis_url=URL,
        run="run",
        writer="replay-1",
        recordings=tmp_path / "a.jsonl",
        tokenizer=tmp_path / "tokenizer",
        shard=1,
        num_shards=3,
        max_groups=5,
        speed=2.5,
        policy=SmallModelSpec(vocab_size=20),
        num_threads=1,
    )

    start_replay(cast("Stack", stack), config)

    assert received("start_replay", stack) == config


def test_a_generator_gets_the_preset_of_its_job(
    stack: RecordingStack, received: Callable[..., Any]
) -> None:
    preset = GuessingPreset(
        game=GuessingGame(num_numbers=7, max_guesses=3), group_size=4, temperature=0.9
    )

    start_live_generator(
        cast("Stack", stack),
        preset,
        run="run",
        writer="live-1",
        groups_per_round=16,
        seed=5,
        num_threads=1,
    )

    config = received("start_live_generator", stack)
    assert (config.run, config.writer, config.redis_url) == ("run", "live-1", URL)
    assert (config.game, config.group_size) == (preset.game, 4)
    assert (config.temperature, config.groups_per_round) == (0.9, 16)
    assert (config.seed, config.num_threads) == (5, 1)


def test_the_address_of_the_store_is_not_on_a_command_line(
    stack: RecordingStack, tmp_path: Path
) -> None:
    config = ReplayConfig(
        redis_url="redis://me:hush@store/0",
        run="run",
        writer="replay-0",
        recordings=tmp_path / "a.jsonl",
        tokenizer=tmp_path,
    )

    start_replay(cast("Stack", stack), config)

    assert not any("hush" in argument for argument in stack.arguments)
