"""The command `turnstream`: jobs here, the other commands in the modules of this folder.

Imports of torch, gRPC and the services stand inside the command that uses them. The options of
the services are loaded by `turnstream serve` and by the help.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from turnstream.errors import TurnstreamError
from turnstream_server.cli import dead, key, rollout, run, store
from turnstream_server.cli.options import console, environment, interruptible
from turnstream_server.options import DemoOptions, Engines, ReplayOptions, with_options


class _Commands(TyperGroup):
    """All commands; `serve` is built at its first use: its options cost 40 ms of CPU time."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), "serve"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name != "serve":
            return super().get_command(ctx, cmd_name)
        from turnstream_server.cli import serve

        command = typer.main.get_command(serve.app)
        command.name = "serve"
        return command


app = typer.Typer(
    name="turnstream",
    cls=_Commands,
    help="The data service between LLM rollouts and training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

JOBS = "Jobs"

TRAINER_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "peft")
"""Packages of the extra `trainer`."""


def _port(owner: str) -> Any:
    help_ = f"Port of {owner}; 0: a free one."
    return typer.Option(min=0, max=65_535, help=help_, metavar="PORT")


@app.command(rich_help_panel=JOBS)
@with_options(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Train a small model live on the guessing game, until its reward has risen.

    Starts store, batcher, trainer and generators as processes, shows their progress, and ends in
    a summary. Exits with 1 when the mean reward has not doubled, or has not reached --goal.
    """
    from turnstream_server.launch.demo import run_demo

    with interruptible():
        raise typer.Exit(run_demo(environment(), options, console()))


@app.command(rich_help_panel=JOBS)
@with_options(ReplayOptions)
def replay(options: ReplayOptions) -> None:
    """Train a tiny model on recorded trajectories, published as if they were live.

    Every trajectory of the file is published turn by turn, and every group is trained on once.
    """
    from turnstream_server.launch.replay import run_replay_job

    with interruptible():
        run_replay_job(environment(), options, console())


@app.command(rich_help_panel=JOBS)
def up(
    data_dir: Annotated[Path, typer.Option(help="Folder of the data and the logs; kept.")] = Path(
        ".turnstream/up"
    ),
    batchers: Annotated[int, typer.Option(min=1, help="Number of batcher replicas.")] = 1,
    port: Annotated[int | None, _port("the first batcher, by default 7600")] = None,
    store_port: Annotated[int | None, _port("the store, by default 7379")] = None,
    base_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATH",
            help="Folder of a base model for clients of the Tinker API. Several are allowed.",
        ),
    ] = None,
    http_port: Annotated[int | None, _port("the HTTP API, by default 7601")] = None,
    engine: Engines = None,
) -> None:
    """Run store, batcher and gateway until Ctrl-C; generators and trainers connect to them.

    With --base-model, the tinker SDK trains and samples through the gateway.
    """
    from turnstream_server.launch.up import run_up

    ports = {"batcher_port": port, "store_port": store_port, "http_port": http_port}
    given = {name: value for name, value in ports.items() if value is not None}
    with interruptible():
        run_up(
            environment().model_copy(update=given),
            folder=data_dir,
            num_batchers=batchers,
            console=console(),
            base_models=base_model or (),
            engines=engine or (),
        )


@app.command(rich_help_panel=JOBS)
def byte_model(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Receives the model.")],
    hidden_size: Annotated[int, typer.Option(min=4, help="Width of the model.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a small model with random weights, whose tokens are bytes, to try things out."""
    from turnstream_server.models.byte_model import byte_model_spec, write_byte_model

    spec = byte_model_spec(hidden_size=hidden_size, num_layers=layers, seed=seed)
    write_byte_model(folder, spec)


app.add_typer(rollout.app)
app.add_typer(store.app)
app.add_typer(run.app, name="run")
app.add_typer(dead.app, name="dead")
app.add_typer(key.app, name="key")


def main() -> None:
    """Run the command line; an error that Turnstream raises on purpose is one clear line."""
    try:
        app()
    except (TurnstreamError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if error.name not in TRAINER_PACKAGES:
            raise
        print(
            f"error: this command needs the package {error.name}: pip install "
            "'turnstream-server[trainer]' (in the repository: pip install '.[trainer]')",
            file=sys.stderr,
        )
        sys.exit(1)
