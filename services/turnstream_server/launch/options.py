"""Settings of the jobs that train. The command line has an option for each field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from turnstream_server.options import Dump, Groups, Recordings, SummaryFile, TokenizerFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Settings of `turnstream demo`."""

    json_path: SummaryFile = None
    folder: Annotated[
        Path,
        typer.Option("--data-dir", help="Folder of the job; an earlier demo in it is removed."),
    ] = Path(".turnstream/demo")
    max_seconds: Annotated[
        float, typer.Option(min=1, help="Fail if the reward has not risen by then.")
    ] = 300.0
    seed: Annotated[int, typer.Option(help="Seed of weights, secrets and sampling.")] = 0
    num_generators: Annotated[
        int, typer.Option("--generators", min=1, help="Number of generator processes.")
    ] = 2
    goal: Annotated[
        float, typer.Option(min=0, max=1, help="Mean reward of the last tenth of the games.")
    ] = 0.8
    lora_rank: Annotated[
        int, typer.Option(min=0, help="Train a LoRA adapter of this rank; 0: all weights.")
    ] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Settings of `turnstream replay`."""

    recordings: Recordings
    tokenizer: TokenizerFolder
    json_path: SummaryFile = None
    folder: Annotated[
        Path,
        typer.Option("--data-dir", help="Folder of the job; an earlier replay in it is removed."),
    ] = Path(".turnstream/replay")
    max_groups: Groups = 0
    num_processes: Annotated[
        int, typer.Option("--processes", min=1, help="Number of replay processes.")
    ] = 2
    batch_groups: Annotated[int, typer.Option(min=1, help="Groups of one training step.")] = 4
    with_logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Send log-probabilities, by the first weights.")
    ] = False
    dump_folder: Dump = None
    max_seconds: Annotated[float, typer.Option(min=1, help="Longest duration, in seconds.")] = (
        3600.0
    )
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0
