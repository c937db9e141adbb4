"""Options of a worker of hosted models. The command line has an option for each annotated field.

Without torch and numpy, so that the command line answers at once.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, get_args

import typer

from turnstream.errors import InvalidConfigError
from turnstream_server.models.spec import parse_bases
from turnstream_server.options import BaseModels, ProcessName, Redis, SharedFolder, Threads
from turnstream_server.trainer.settings import Dtype, Layout, require_one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """One worker process of hosted models, or each of its ranks.

    Raises:
        InvalidConfigError: a setting cannot work; names the setting and its value.
    """

    base_model: BaseModels
    folder: SharedFolder
    redis_url: Redis = ""
    batcher_target: Annotated[
        str,
        typer.Option(
            "--batcher",
            metavar="HOST:PORT",
            help="Default: the batchers registered in the store.",
            show_default=False,
        ),
    ] = ""
    worker: ProcessName = field(default_factory=socket.gethostname)
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the tokenizer for clients. Default: the folder of the base model. "
            "Clients find that of a name such as org/model by themselves."
        ),
    ] = None
    full: Annotated[
        bool, typer.Option("--full", help="Train all weights of each model, and no adapters.")
    ] = False
    max_rank: Annotated[int, typer.Option(min=1, help="Largest rank of an adapter.")] = 256
    layout: Annotated[
        str,
        typer.Option(
            metavar="padded|packed", help="Rows at one width, or one after another without padding."
        ),
    ] = "padded"
    dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|float32|bfloat16",
            help="Matrix products; auto: bfloat16 on CUDA. Trained weights stay float32.",
        ),
    ] = "auto"
    gradient_checkpointing: Annotated[
        bool, typer.Option(help="Compute layers again for the gradient: less memory, more time.")
    ] = False
    checkpoint_every: Annotated[
        int,
        typer.Option(
            min=1,
            help="Optimizer steps between two durable checkpoints of a model. After a crash, the "
            "commands since the newest one are run again.",
        ),
    ] = 8
    gap_s: Annotated[
        float,
        typer.Option(
            "--gap", min=0, help="Longest wait for a missing command of a model, in seconds."
        ),
    ] = 120.0
    num_threads: Threads = 0

    def __post_init__(self) -> None:
        require_one_of("layout", self.layout, get_args(Layout))
        require_one_of("dtype", self.dtype, get_args(Dtype))
        for name in ("max_rank", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(name, f"{getattr(self, name)} is below 1")
        if not self.gap_s >= 0:
            raise InvalidConfigError("gap_s", f"{self.gap_s} is below 0")
        parse_bases(self.base_model)
