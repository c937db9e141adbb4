"""Settings of a trainer process. The command line has an option for each annotated field.

Without torch and numpy, so that the command line answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from turnstream.errors import InvalidConfigError
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.options import Dump, Redis, Threads


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """One trainer process.

    Attributes:
        policy: the first weights; a checkpoint in `folder` replaces them.
        small_model: the sizes of the first weights, in place of `policy`.
    """

    run: Annotated[
        str, typer.Option("--run", help="Name of the run; without --preset it must exist.")
    ]
    folder: Annotated[Path, typer.Option(help="Receives checkpoints, weights and metrics.")]
    policy: Annotated[
        Path | None,
        typer.Option(help="Model folder, or a JSON file that describes a small model."),
    ] = None
    small_model: SmallModelSpec | None = None
    batcher_target: Annotated[
        str,
        typer.Option(
            "--batcher",
            metavar="HOST:PORT",
            help="Default: the batchers registered in the store.",
            show_default=False,
        ),
    ] = ""
    redis_url: Redis = ""
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Default: 1e-6, or that of the preset.")
    ] = None
    warmup_updates: Annotated[int, typer.Option(min=0, help="Updates of linear warm-up.")] = 0
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature of the generators.")
    ] = 1.0
    checkpoint_every: Annotated[int, typer.Option(min=1, help="In steps.")] = 10
    max_steps: Annotated[int, typer.Option(min=0, help="0: until the run ends.")] = 0
    num_threads: Threads = 0
    seed: Annotated[int, typer.Option(help="Seed of training.")] = 0
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Longest wait for one batch, in seconds.")
    ] = 600.0
    dump_folder: Dump = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InvalidConfigError("temperature", f"{self.temperature} is not above 0")
        if self.checkpoint_every < 1:
            raise InvalidConfigError("checkpoint_every", f"{self.checkpoint_every} is below 1")
