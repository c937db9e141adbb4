"""Settings of the generator processes. The command line has an option for each field.

Without torch and numpy, so that the command line answers at once.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from turnstream.errors import InvalidConfigError
from turnstream_server.options import Groups, Recordings, Redis, Run, Threads, TokenizerFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGeneratorConfig:
    """One process that plays the guessing game.

    Each generator of a run has another `writer` and another `seed`.
    """

    run: Run
    redis_url: Redis = ""
    writer: Annotated[
        str,
        typer.Option(
            help="Name of this process in the run; its group ids begin with it. "
            "Default: live-<host>-<process>.",
            show_default=False,
        ),
    ] = field(default_factory=lambda: f"live-{socket.gethostname()}-{os.getpid()}")
    group_size: int = 8
    """Games with one secret."""
    groups_per_round: Annotated[
        int, typer.Option("--round", min=1, help="Groups played at the same time.")
    ] = 32
    max_groups: int = 0
    """Groups after which it stops; 0 plays until the run is closed."""
    num_threads: Threads = 0
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of secrets and sampling. Default: a random one.", show_default=False
        ),
    ] = field(default_factory=lambda: secrets.randbits(31))
    timeout_s: float = 600.0
    """Longest wait for the first weights, and for the admission of a group."""
    cache: Annotated[
        Path | None,
        typer.Option(
            "--weights-cache",
            help="Folder of this process for weights from HTTP. Default: a temporary one.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """One process that publishes recorded trajectories."""

    recordings: Recordings
    run: Run
    tokenizer: TokenizerFolder
    redis_url: Redis = ""
    writer: Annotated[str, typer.Option(help="Name of this process in the run.")] = "replay-0"
    shard: Annotated[int, typer.Option(min=0, help="Publish the groups shard, shard + N ...")] = 0
    num_shards: Annotated[int, typer.Option("--shards", min=1, help="Number N of shares.")] = 1
    max_groups: Groups = 0
    policy: Annotated[
        Path | None,
        typer.Option(
            "--logprobs-by", help="Policy that computes log-probabilities; else none are sent."
        ),
    ] = None
    timeout_s: float = 3600.0
    """Longest wait for the admission of a group."""

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.num_shards:
            raise InvalidConfigError("shard", f"{self.shard} is not below {self.num_shards}")
