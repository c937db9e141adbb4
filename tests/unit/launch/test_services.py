"""Options that a job gives to a service arrive there through its command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from turnstream_server import bootstrap, cli
from turnstream_server.generators.config import LiveGeneratorConfig, ReplayConfig
from turnstream_server.generators.guessing import LEARNING_RATE, preset_policy
from turnstream_server.launch.job import write_policy
from turnstream_server.launch.stack import Stack
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.trainer.config import TrainerConfig

Start = Callable[..., Any]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """`start(kind, ...)` returns the config that the command line of a service makes."""
    configs: list[Any] = []

    def keep(_settings: object, config: object, **_store: object) -> None:
        configs.append(config)

    def run(_stack: Stack, _name: str, command: Sequence[str]) -> None:
        assert not any("hush" in word for word in command)
        words = [*command[command.index("serve") : -1]]
        result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output

    for starter in ("start_trainer", "start_live_generator", "start_replay"):
        monkeypatch.setattr(bootstrap, starter, keep)
    monkeypatch.setattr(Stack, "start_program", run)
    stack = Stack(tmp_path, store_url="redis://me:hush@store:6379/0")

    def start(kind: str, *words: str, **options: object) -> Any:
        stack.start(kind, "name", *words, run="run", **options)
        return configs[-1]

    return start


def test_trainer_gets_the_options_of_its_job(start: Start, tmp_path: Path) -> None:
    policy = write_policy(tmp_path, SmallModelSpec(vocab_size=20, hidden_size=8, seed=3))

    config = start(
        "trainer",
        *("--loss", "gspo:clip_low=3e-4,clip_high=4e-4", "--correction", "tis:cap=2"),
        *("--correction", "mis:level=geometric", "--kl", "k3:coefficient=0.01"),
        *("--reference", str(tmp_path), "--entropy-bonus", "0.001", "--denominators", "recount"),
        batcher="127.0.0.1:7",
        policy=policy,
        folder=tmp_path,
        learning_rate=0.002,
        epochs=2,
        timeout=90.0,
        dump=tmp_path / "dump",
    )

    assert str(config.objective) == (
        "--loss gspo --correction tis --correction mis:level=geometric --kl k3:coefficient=0.01 "
        "--entropy-bonus 0.001 --proximal recompute --denominators recount"
    )
    assert config == TrainerConfig(
        run="run",
        batcher_target="127.0.0.1:7",
        policy=policy,
        folder=tmp_path,
        learning_rate=0.002,
        epochs=2,
        timeout_s=90.0,
        dump_folder=tmp_path / "dump",
        loss="gspo:clip_low=3e-4,clip_high=4e-4",
        correction=["tis:cap=2", "mis:level=geometric"],
        kl="k3:coefficient=0.01",
        reference=tmp_path,
        entropy_bonus=0.001,
        denominators="recount",
    )


def test_replay_process_gets_the_options_of_its_job(start: Start, tmp_path: Path) -> None:
    options = {"writer": "replay-1", "tokenizer": tmp_path, "shard": 1}

    config = start("replayer", str(tmp_path / "a"), shards=3, groups=5, logprobs_by=None, **options)

    assert config == ReplayConfig(
        run="run", recordings=tmp_path / "a", num_shards=3, max_groups=5, **options
    )


def test_demo_services_have_the_preset_as_default(start: Start, tmp_path: Path) -> None:
    trainer = start("trainer", preset="guessing", folder=tmp_path, seed=7)
    generator = start("generator", writer="live-1", round=16, seed=5)

    assert trainer.small_model == preset_policy(seed=7)
    assert trainer.learning_rate == LEARNING_RATE
    assert trainer.temperature == 1.0
    assert generator == LiveGeneratorConfig(run="run", writer="live-1", groups_per_round=16, seed=5)
    first, second = start("generator"), start("generator")
    assert first.writer.startswith("live-")
    assert first.seed != second.seed
