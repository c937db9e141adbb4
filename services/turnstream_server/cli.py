"""The command `turnstream`: whole jobs, every service by itself, and a look into a store.

Whatever needs torch, gRPC or the services is imported inside the command that uses it, so that
`turnstream --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from turnstream.errors import TurnstreamError
from turnstream_server import cli_life, cli_runs, cli_store
from turnstream_server.cli_options import Redis, console, environment

app = typer.Typer(
    name="turnstream",
    help="The data service between LLM rollouts and training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

JOBS = "Jobs: everything together, on the embedded server"
SERVICES = "Services, one process each"

Run = Annotated[str, typer.Option("--run", help="Name of the run; it must exist.")]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the summary here.")
]
Threads = Annotated[
    int, typer.Option("--threads", min=0, help="Threads of torch; 0 leaves torch's own choice.")
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


@app.command(rich_help_panel=JOBS)
def demo(
    json_path: Json = None,
    data_dir: Annotated[
        Path, typer.Option(help="Folder of the job; an earlier demo in it is removed.")
    ] = Path(".turnstream/demo"),
    max_seconds: Annotated[
        float, typer.Option(min=1, help="Give up when the reward has not risen by then.")
    ] = 300.0,
    seed: Annotated[int, typer.Option(help="Of weights, secrets and sampling.")] = 0,
    generators: Annotated[int, typer.Option(min=1, help="Number of generator processes.")] = 2,
) -> None:
    """Train a small model live on the guessing game, until its reward has risen.

    Starts store, batcher, trainer and generators as processes, shows their progress, and ends in
    a summary. Exits with 1 when the mean reward has not doubled, or has not reached 0.6 of the
    best policy's.
    """
    from turnstream_server.jobs.demo import DemoOptions, run_demo

    options = DemoOptions(
        folder=data_dir,
        json_path=json_path,
        max_seconds=max_seconds,
        seed=seed,
        num_generators=generators,
    )
    with _interruptible():
        raise typer.Exit(run_demo(environment(), options, console()))


@app.command(rich_help_panel=JOBS)
def replay(
    file: Annotated[Path, typer.Argument(help="Recorded trajectories, JSON lines or .gz.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer.")],
    json_path: Json = None,
    data_dir: Annotated[
        Path, typer.Option(help="Folder of the job; an earlier replay in it is removed.")
    ] = Path(".turnstream/replay"),
    groups: Annotated[int, typer.Option(min=0, help="Only so many groups; 0 means all.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Number of replay processes.")] = 2,
    batch_groups: Annotated[int, typer.Option(min=1, help="Groups of one training step.")] = 4,
    speed: Annotated[
        float, typer.Option(min=0, help="Recorded seconds per second; 0: as fast as possible.")
    ] = 0.0,
    with_logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Send log-probabilities, by the first weights.")
    ] = False,
    dump: Annotated[
        Path | None, typer.Option(help="Folder for the rows of every mini-batch trained on.")
    ] = None,
    max_seconds: Annotated[float, typer.Option(min=1, help="Give up after so long.")] = 3600.0,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
) -> None:
    """Train a tiny model on recorded trajectories, published as if they were live.

    Every trajectory of the file is published turn by turn, and every group is trained on once.
    """
    from turnstream_server.jobs.replay import ReplayOptions, run_replay_job

    options = ReplayOptions(
        recordings=file,
        tokenizer=tokenizer,
        folder=data_dir,
        json_path=json_path,
        max_groups=groups,
        num_processes=processes,
        batch_groups=batch_groups,
        speed=speed,
        with_logprobs=with_logprobs,
        dump_folder=dump,
        max_seconds=max_seconds,
        seed=seed,
    )
    with _interruptible():
        raise typer.Exit(run_replay_job(environment(), options, console()))


@app.command(rich_help_panel=JOBS)
def up(
    data_dir: Annotated[Path, typer.Option(help="Folder of the data and the logs; kept.")] = Path(
        ".turnstream/up"
    ),
    batchers: Annotated[int, typer.Option(min=1, help="Number of batcher replicas.")] = 1,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="Of the first batcher: 7600; 0 takes a free one.",
            metavar="PORT",
        ),
    ] = None,
    store_port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="Of the store: 7379; 0: a free one.", metavar="PORT"),
    ] = None,
) -> None:
    """Run the store and the batcher until Ctrl-C; generators and trainers connect to them."""
    from turnstream_server.jobs.up import run_up

    ports = {"batcher_port": port, "store_port": store_port}
    given = {name: value for name, value in ports.items() if value is not None}
    with _interruptible():
        run_up(
            environment().model_copy(update=given),
            folder=data_dir,
            num_batchers=batchers,
            console=console(),
        )


@app.command(rich_help_panel=SERVICES)
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


@app.command(rich_help_panel=SERVICES)
def trainer(
    run: Run,
    batcher_target: Annotated[str, typer.Option("--batcher", metavar="HOST:PORT")],
    policy: Annotated[
        Path, typer.Option(help="Model folder, or a JSON file that describes a small model.")
    ],
    folder: Annotated[Path, typer.Option(help="Receives checkpoints, weights and metrics.")],
    learning_rate: Annotated[float, typer.Option(min=0)] = 1e-6,
    warmup_updates: Annotated[int, typer.Option(min=0, help="Of linear growth.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, help="The generators' own.")] = 1.0,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="In steps.")] = 10,
    max_steps: Annotated[int, typer.Option(min=0, help="0: until the run ends.")] = 0,
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Of whatever is random in training.")] = 0,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Longest wait for one batch, in seconds.")
    ] = 600.0,
    dump: Annotated[
        Path | None, typer.Option(help="Folder for the rows of every mini-batch trained on.")
    ] = None,
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Train a policy on the batches of a run."""
    from turnstream_server import bootstrap
    from turnstream_server.models.spec import read_policy_source
    from turnstream_server.trainer.config import ObjectiveConfig, OptimizerConfig, TrainerConfig

    config = TrainerConfig(
        run=run,
        batcher_target=batcher_target,
        policy=read_policy_source(policy),
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
    raise typer.Exit(bootstrap.start_trainer(environment(), config))


@app.command(rich_help_panel=SERVICES)
def generator(
    run: Run,
    redis: Redis = None,
    writer: Annotated[str, typer.Option(help="Name of this process in the run.")] = "live-0",
    numbers: Annotated[int, typer.Option(min=2, help="The secret is 1 to this.")] = 15,
    guesses: Annotated[int, typer.Option(min=1, help="Guesses of one game.")] = 4,
    group_size: Annotated[int, typer.Option(min=1, help="Games with one secret.")] = 8,
    groups_per_round: Annotated[
        int, typer.Option("--round", min=1, help="Groups played at the same time.")
    ] = 32,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling.")] = 1.0,
    max_groups: Annotated[int, typer.Option(min=0, help="0: until the run is closed.")] = 0,
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Of secrets and sampling.")] = 0,
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
        writer=writer,
        game=GuessingGame(num_numbers=numbers, max_guesses=guesses),
        group_size=group_size,
        groups_per_round=groups_per_round,
        temperature=temperature,
        seed=seed,
        max_groups=max_groups,
        num_threads=threads,
    )
    raise typer.Exit(bootstrap.start_live_generator(settings, config))


@app.command(rich_help_panel=SERVICES)
def replayer(
    file: Annotated[Path, typer.Argument(help="Recorded trajectories, JSON lines or .gz.")],
    run: Run,
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer.")],
    redis: Redis = None,
    writer: Annotated[str, typer.Option(help="Name of this process in the run.")] = "replay-0",
    shard: Annotated[int, typer.Option(min=0, help="Publish the groups shard, shard + N ...")] = 0,
    shards: Annotated[int, typer.Option(min=1, help="... of this many N.")] = 1,
    groups: Annotated[int, typer.Option(min=0, help="Only so many groups; 0 means all.")] = 0,
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
    with _interruptible():
        bootstrap.start_replay(settings, config)


app.add_typer(cli_store.app)
app.add_typer(cli_runs.app)
app.add_typer(cli_life.app)


def main() -> None:
    """Run the command line; an error that Turnstream raises on purpose is one clear line."""
    try:
        app()
    except (TurnstreamError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Inside the block SIGTERM is Ctrl-C, and both end in "interrupted" and status 130."""
    from turnstream_server.jobs.stack import terminate_as_interrupt

    try:
        with terminate_as_interrupt():
            yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


def _end_with_stdin() -> None:
    from turnstream_server.jobs.orphans import end_when_stdin_closes

    end_when_stdin_closes()


if __name__ == "__main__":
    main()
