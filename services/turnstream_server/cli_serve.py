"""The commands `turnstream serve ...`: every service as a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnstream.errors import InvalidConfigError
from turnstream_server.cli_options import environment, group, interruptible
from turnstream_server.generators.config import LiveGeneratorConfig, ReplayConfig
from turnstream_server.options import Dump, Redis, Threads, with_options

if TYPE_CHECKING:
    from turnstream_server.trainer.config import TrainerConfig

app = group("Services, one process each.")

EndWithStdin = Annotated[
    bool,
    typer.Option(
        "--end-with-stdin",
        hidden=True,
        callback=lambda wanted: _end_with_stdin() if wanted else None,
        is_eager=True,
    ),
]


@app.command()
def batcher(
    redis: Redis = "",
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0: a free one.")
    ] = None,
    address_file: Annotated[
        Path | None, typer.Option(help="Receives HOST:PORT once batches are served.")
    ] = None,
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Plan, assemble and serve the batches of every run in the store."""
    from turnstream_server import bootstrap

    bootstrap.start_batcher(
        environment(), redis_url=redis, listen=listen, address_file=address_file
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Settings of `turnstream serve trainer`."""

    run: Annotated[
        str, typer.Option("--run", help="Name of the run; without --preset it must exist.")
    ]
    folder: Annotated[Path, typer.Option(help="Receives checkpoints, weights and metrics.")]
    policy: Annotated[
        Path | None,
        typer.Option(help="Model folder, or a JSON file that describes a small model."),
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(help="`guessing`: create the run of the demo, with its model and its rates."),
    ] = None
    batcher: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Default: the batchers registered in the store.",
            show_default=False,
        ),
    ] = ""
    redis: Redis = ""
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Default: 1e-6, or that of the preset.")
    ] = None
    warmup_updates: Annotated[int, typer.Option(min=0, help="Updates of linear warm-up.")] = 0
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature of the generators.")
    ] = 1.0
    checkpoint_every: Annotated[int, typer.Option(min=1, help="In steps.")] = 10
    max_steps: Annotated[int, typer.Option(min=0, help="0: until the run ends.")] = 0
    threads: Threads = 0
    seed: Annotated[int, typer.Option(help="Seed of training.")] = 0
    timeout: Annotated[
        float, typer.Option(min=0, help="Longest wait for one batch, in seconds.")
    ] = 600.0
    dump: Dump = None

    def __post_init__(self) -> None:
        if self.preset not in (None, "guessing"):
            message = f"{self.preset!r} is no preset; the only one is guessing"
            raise InvalidConfigError("--preset", message)
        if (self.policy is None) == (self.preset is None):
            raise InvalidConfigError("--policy", "use either --policy or --preset")

    def config(self) -> TrainerConfig:
        """Return the settings of the trainer, with those of the preset as defaults."""
        from turnstream_server.generators.preset import LEARNING_RATE, preset_policy
        from turnstream_server.models.spec import read_policy_source
        from turnstream_server.trainer.config import ObjectiveConfig, OptimizerConfig, TrainerConfig

        default_rate = LEARNING_RATE if self.preset else 1e-6
        return TrainerConfig(
            run=self.run,
            batcher_target=self.batcher,
            policy=read_policy_source(self.policy)
            if self.policy
            else preset_policy(seed=self.seed),
            folder=self.folder,
            optimizer=OptimizerConfig(
                learning_rate=default_rate if self.learning_rate is None else self.learning_rate,
                num_warmup_updates=self.warmup_updates,
            ),
            objective=ObjectiveConfig(temperature=self.temperature),
            checkpoint_every=self.checkpoint_every,
            max_steps=self.max_steps,
            num_threads=self.threads,
            seed=self.seed,
            timeout_s=self.timeout,
            dump_folder=self.dump,
        )


@app.command()
@with_options(TrainerOptions)
def trainer(options: TrainerOptions, *, end_with_stdin: EndWithStdin = False) -> None:
    """Train a policy on the batches of a run."""
    from turnstream_server import bootstrap
    from turnstream_server.generators.preset import preset_config

    new_run = preset_config() if options.preset else None
    bootstrap.start_trainer(
        environment(), options.config(), redis_url=options.redis, new_run=new_run
    )


@app.command()
@with_options(LiveGeneratorConfig)
def generator(config: LiveGeneratorConfig, *, end_with_stdin: EndWithStdin = False) -> None:
    """Play the guessing game with the newest weights of the run."""
    from turnstream_server import bootstrap

    bootstrap.start_live_generator(environment(), config)


@app.command()
@with_options(ReplayConfig)
def replayer(config: ReplayConfig, *, end_with_stdin: EndWithStdin = False) -> None:
    """Publish recorded trajectories into a run, turn by turn."""
    from turnstream_server import bootstrap

    with interruptible():
        bootstrap.start_replay(environment(), config)


def _end_with_stdin() -> None:
    from turnstream_server.jobs.stack import end_when_stdin_closes

    end_when_stdin_closes()
