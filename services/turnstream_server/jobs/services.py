"""The services of Turnstream as processes of a stack: command lines, and waiting until ready.

The address of the store travels in the environment, where it may carry a password.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from turnstream_server.jobs.stack import Service, Stack

if TYPE_CHECKING:
    from turnstream_server.generators.environments.preset import GuessingPreset
    from turnstream_server.generators.replay import ReplayConfig
    from turnstream_server.models.spec import PolicySource
    from turnstream_server.trainer.config import TrainerConfig

_READY_S = 60.0


class StartedBatcher(NamedTuple):
    """A batcher that answers at `address`, "host:port"."""

    service: Service
    address: str


def store_environment(url: str) -> dict[str, str]:
    """Return the environment variable that names the store to a service."""
    return {"TURNSTREAM_REDIS_URL": url}


def start_batcher(stack: Stack, *, name: str, listen: str = "127.0.0.1:0") -> StartedBatcher:
    """Start a batcher and wait until it answers."""
    address_file = stack.folder / f"{name}.address"
    address_file.unlink(missing_ok=True)
    service = stack.start(
        name, ["serve", "batcher", "--listen", listen, "--address-file", str(address_file)]
    )
    address = stack.wait_for_file(address_file, of=service, timeout_s=_READY_S)
    return StartedBatcher(service, address)


def start_trainer(stack: Stack, config: TrainerConfig, *, name: str = "trainer") -> Service:
    """Start a trainer."""
    arguments = [
        *("--run", config.run, "--batcher", config.batcher_target),
        *("--policy", str(_policy_path(stack, config.policy))),
        *("--folder", str(config.folder)),
        *("--learning-rate", str(config.optimizer.learning_rate)),
        *("--warmup-updates", str(config.optimizer.num_warmup_updates)),
        *("--temperature", str(config.objective.temperature)),
        *("--checkpoint-every", str(config.checkpoint_every)),
        *("--max-steps", str(config.max_steps), "--threads", str(config.num_threads)),
        *("--seed", str(config.seed), "--timeout", str(config.timeout_s)),
    ]
    if config.dump_folder is not None:
        arguments += ["--dump", str(config.dump_folder)]
    return stack.start(name, ["serve", "trainer", *arguments])


def start_live_generator(
    stack: Stack,
    preset: GuessingPreset,
    *,
    run: str,
    writer: str,
    groups_per_round: int,
    seed: int,
    num_threads: int,
) -> Service:
    """Start a generator that plays the guessing game."""
    game = preset.game
    arguments = [
        *("--run", run, "--writer", writer, "--seed", str(seed), "--threads", str(num_threads)),
        *("--numbers", str(game.num_numbers), "--guesses", str(game.max_guesses)),
        *("--group-size", str(preset.group_size), "--round", str(groups_per_round)),
        *("--temperature", str(preset.temperature)),
    ]
    return stack.start(writer, ["serve", "generator", *arguments])


def start_replay(stack: Stack, config: ReplayConfig) -> Service:
    """Start a process that publishes one share of a file."""
    arguments = [
        str(config.recordings),
        *("--run", config.run, "--writer", config.writer),
        *("--tokenizer", str(config.tokenizer)),
        *("--shard", str(config.shard), "--shards", str(config.num_shards)),
        *("--groups", str(config.max_groups), "--speed", str(config.speed)),
        *("--threads", str(config.num_threads)),
    ]
    if config.policy is not None:
        arguments += ["--logprobs-by", str(_policy_path(stack, config.policy))]
    return stack.start(config.writer, ["serve", "replayer", *arguments])


def _policy_path(stack: Stack, policy: PolicySource) -> Path:
    """Where a command line can name the policy: its folder, or its spec in a file."""
    if isinstance(policy, Path):
        return policy
    path = stack.folder / "policy.json"
    path.write_text(json.dumps(asdict(policy), indent=2) + "\n", encoding="utf-8")
    return path
