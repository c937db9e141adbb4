"""The commands `turnstream serve ...`: every service as a process of its own."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer

from turnstream.errors import InvalidConfigError
from turnstream_server.cli_options import (
    Dump,
    Groups,
    Recordings,
    Redis,
    TokenizerFolder,
    environment,
    group,
    interruptible,
)

app = group("Services, one process each.")

Run = Annotated[str, typer.Option("--run", help="Name of the run; it must exist.")]
Threads = Annotated[
    int, typer.Option("--threads", min=0, help="Threads of torch; 0: the default of torch.")
]
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
    redis: Redis = None,
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

    settings = environment()
    bootstrap.start_batcher(
        settings,
        redis_url=bootstrap.store_url(settings, redis),
        listen=listen,
        address_file=address_file,
    )


@app.command()
def trainer(
    run: Annotated[
        str, typer.Option("--run", help="Name of the run; without --preset it must exist.")
    ],
    folder: Annotated[Path, typer.Option(help="Receives checkpoints, weights and metrics.")],
    policy: Annotated[
        Path | None,
        typer.Option(help="Model folder, or a JSON file that describes a small model."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="`guessing`: create the run of the demo, with its model and its rates."),
    ] = None,
    batcher_target: Annotated[
        str,
        typer.Option(
            "--batcher", metavar="HOST:PORT", help="Default: the batchers registered in the store."
        ),
    ] = "",
    redis: Redis = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Default: 1e-6, or that of the preset.")
    ] = None,
    warmup_updates: Annotated[int, typer.Option(min=0, help="Updates of linear warm-up.")] = 0,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature of the generators.")
    ] = 1.0,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="In steps.")] = 10,
    max_steps: Annotated[int, typer.Option(min=0, help="0: until the run ends.")] = 0,
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Seed of training.")] = 0,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Longest wait for one batch, in seconds.")
    ] = 600.0,
    dump: Dump = None,
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Train a policy on the batches of a run."""
    from turnstream_server import bootstrap
    from turnstream_server.generators.environments.preset import GuessingPreset
    from turnstream_server.models.spec import read_policy_source
    from turnstream_server.trainer.config import ObjectiveConfig, OptimizerConfig, TrainerConfig

    if preset not in (None, "guessing"):
        raise InvalidConfigError("--preset", f"{preset!r} is no preset; the only one is guessing")
    if (policy is None) == (preset is None):
        raise InvalidConfigError("--policy", "use either --policy or --preset")
    values = GuessingPreset() if preset else None
    if learning_rate is None:
        learning_rate = values.learning_rate if values else 1e-6
    config = TrainerConfig(
        run=run,
        batcher_target=batcher_target,
        policy=read_policy_source(policy) if policy else GuessingPreset().policy(seed=seed),
        folder=folder,
        optimizer=OptimizerConfig(learning_rate=learning_rate, num_warmup_updates=warmup_updates),
        objective=ObjectiveConfig(temperature=temperature),
        checkpoint_every=checkpoint_every,
        max_steps=max_steps,
        num_threads=threads,
        seed=seed,
        timeout_s=timeout_s,
        dump_folder=dump,
    )
    bootstrap.start_trainer(
        environment(),
        config,
        redis_url=bootstrap.store_url(environment(), redis),
        new_run=values.batching() if values else None,
    )


@app.command()
def generator(
    run: Run,
    redis: Redis = None,
    writer: Annotated[
        str, typer.Option(help="Name of this process in the run. Default: live-<host>-<process>.")
    ] = "",
    numbers: Annotated[int, typer.Option(min=2, help="The secret is 1 to this.")] = 15,
    guesses: Annotated[int, typer.Option(min=1, help="Guesses of one game.")] = 4,
    group_size: Annotated[int, typer.Option(min=1, help="Games with one secret.")] = 8,
    groups_per_round: Annotated[
        int, typer.Option("--round", min=1, help="Groups played at the same time.")
    ] = 32,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 1.0,
    max_groups: Annotated[int, typer.Option(min=0, help="0: until the run is closed.")] = 0,
    threads: Threads = 0,
    seed: Annotated[
        int | None, typer.Option(help="Seed of secrets and sampling. Default: a random one.")
    ] = None,
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Play the guessing game with the newest weights of the run."""
    from turnstream_server import bootstrap
    from turnstream_server.generators.environments.guessing import GuessingGame
    from turnstream_server.generators.live import LiveGeneratorConfig

    settings = environment()
    config = LiveGeneratorConfig(
        redis_url=bootstrap.store_url(settings, redis),
        run=run,
        writer=writer or f"live-{socket.gethostname()}-{os.getpid()}",
        game=GuessingGame(num_numbers=numbers, max_guesses=guesses),
        group_size=group_size,
        groups_per_round=groups_per_round,
        temperature=temperature,
        seed=secrets.randbits(31) if seed is None else seed,
        max_groups=max_groups,
        num_threads=threads,
    )
    bootstrap.start_live_generator(settings, config)


@app.command()
def replayer(
    file: Recordings,
    run: Run,
    tokenizer: TokenizerFolder,
    redis: Redis = None,
    writer: Annotated[str, typer.Option(help="Name of this process in the run.")] = "replay-0",
    shard: Annotated[int, typer.Option(min=0, help="Publish the groups shard, shard + N ...")] = 0,
    shards: Annotated[int, typer.Option(min=1, help="Number N of shares.")] = 1,
    groups: Groups = 0,
    speed: Annotated[
        float, typer.Option(min=0, help="Recorded seconds per second; 0: as fast as admitted.")
    ] = 0.0,
    logprobs_by: Annotated[
        Path | None, typer.Option(help="Policy that computes log-probabilities; else none.")
    ] = None,
    threads: Threads = 0,
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Publish recorded trajectories into a run, turn by turn."""
    from turnstream_server import bootstrap
    from turnstream_server.generators.replay import ReplayConfig
    from turnstream_server.models.spec import read_policy_source

    settings = environment()
    config = ReplayConfig(
        redis_url=bootstrap.store_url(settings, redis),
        run=run,
        writer=writer,
        recordings=file,
        tokenizer=tokenizer,
        shard=shard,
        num_shards=shards,
        max_groups=groups,
        speed=speed,
        policy=None if logprobs_by is None else read_policy_source(logprobs_by),
        num_threads=threads,
    )
    with interruptible():
        bootstrap.start_replay(settings, config)


def _end_with_stdin() -> None:
    from turnstream_server.jobs.stack import end_when_stdin_closes

    end_when_stdin_closes()
