"""Commands of `turnstream` that read a store: progress, ledger, batches, text."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated

import typer

from turnstream_server.cli.options import (
    console,
    environment,
    interruptible,
    output,
    say,
    store_url,
)
from turnstream_server.options import AsJson, Redis, RunArgument

app = typer.Typer()

PANEL = "Look at a run"


@app.command(rich_help_panel=PANEL)
def status(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Name of the run. Default: every run.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh it until Ctrl-C.")] = False,
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Show progress, ledger, newest batch and the first reason for waiting, on one screen."""
    from turnstream_server.console import runs as command

    url = store_url(redis)
    if watch and not as_json:
        with interruptible():
            command.watch_status(url, run, console())
    found = command.read_status(url, run)
    if as_json:
        typer.echo(json.dumps(found if run is None else found[0], indent=2))
    else:
        command.print_status(url, found, console())


@app.command(rich_help_panel=PANEL)
def why(run: RunArgument, redis: Redis = "", as_json: AsJson = False) -> None:
    """Explain why a run waits, the most important reason first."""
    from turnstream_server.console import runs as command

    output(command.read_reasons(store_url(redis), run), command.print_reasons, as_json=as_json)


@app.command(rich_help_panel=PANEL)
def text(
    run: RunArgument,
    trajectory: Annotated[
        str, typer.Argument(metavar="TRAJECTORY", help="<group>/<sample>/<attempt>.")
    ],
    tokenizer: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder with the tokenizer.json of the model.")
    ],
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Print a trajectory as text: prompts, sampled and masked tokens, turns, rewards."""
    from turnstream_server.console import ledger as command

    content = command.read_text(store_url(redis), run, trajectory, tokenizer=tokenizer)
    output(content, command.print_text, as_json=as_json, ensure_ascii=False)


@app.command(rich_help_panel=PANEL)
def ledger(
    run: RunArgument,
    trajectory: Annotated[
        str | None, typer.Argument(metavar="[TRAJECTORY]", help="<group>/<sample>/<attempt>.")
    ] = None,
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Count the trajectories of a run by state, or show the history of one."""
    from turnstream_server.console import ledger as command

    url = store_url(redis)
    if trajectory is None:
        output(command.read_run_ledger(url, run), command.print_ledger, as_json=as_json)
    else:
        content = command.read_trajectory(url, run, trajectory)
        output(content, functools.partial(command.print_trajectory, run), as_json=as_json)


@app.command(rich_help_panel=PANEL)
def batch(
    run: RunArgument,
    step: Annotated[int, typer.Argument(metavar="STEP", min=1, help="Number of the batch.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write its mini-batches as Arrow streams.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Show how turns merge, and where a prompt differs.")
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Every trajectory, not only 12.")] = False,
    dp_rank: Annotated[int, typer.Option(min=0, help="Rank whose mini-batches --out writes.")] = 0,
    dp_world_size: Annotated[int, typer.Option(min=1, help="Number of ranks, for --out.")] = 1,
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Show the content of one batch: sizes, rewards, advantages."""
    from turnstream_server.console import batches as command

    url = store_url(redis)
    if out is not None:
        ranks = {"dp_rank": dp_rank, "dp_world_size": dp_world_size}
        paths = [str(path) for path in command.write_batch(url, run, step, out, **ranks)]
        say("\n".join(paths), as_json=as_json, files=paths)
    elif merge:
        output(command.read_merge(url, run, step), command.print_merge, as_json=as_json)
    else:
        print_batch = functools.partial(command.print_batch, run, show_all=show_all)
        output(command.read_batch(url, run, step), print_batch, as_json=as_json)


@app.command(rich_help_panel=PANEL)
def evals(run: RunArgument, redis: Redis = "", as_json: AsJson = False) -> None:
    """Show the results of evaluations, for each version of the weights."""
    from turnstream_server.console import results as command

    results = command.read_evals(store_url(redis), run)
    output(results, functools.partial(command.print_evals, run), as_json=as_json)


@app.command(rich_help_panel=PANEL)
def archive(
    run: RunArgument,
    folder: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Receives a file a step.")],
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Write the committed steps that are still stored as Parquet files."""
    from turnstream_server.console.batches import archive_run

    paths = [str(path) for path in archive_run(store_url(redis), run, folder)]
    say("\n".join(paths) or "nothing to write", as_json=as_json, files=paths)


@app.command(rich_help_panel=PANEL)
def plot(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER_OR_RUN",
            help="Folder of a trainer or of a job, or a run. A run without a trainer on this "
            "machine has its rewards alone.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Receives a PNG image.")],
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Draw reward, loss, KL and tokens per second over the steps of a trainer."""
    from turnstream_server.console.results import read_metrics
    from turnstream_server.trainer.reporting.plot import plot_metrics

    found = read_metrics(source, redis_url=store_url(redis))
    plot_metrics(found.steps, out, title=source)
    num_steps = len(found.steps)
    facts = {"file": str(out), "metrics": found.source, "num_steps": num_steps}
    say(f"{out} shows {num_steps:,} steps of {found.source}", as_json=as_json, **facts)


@app.command(rich_help_panel="Jobs")
def config(as_json: AsJson = False) -> None:
    """Print the settings of this environment, one variable a line."""
    settings = environment().printable()
    if as_json:
        typer.echo(json.dumps(settings, indent=2))
        return
    for name, value in settings.items():
        typer.echo(f"{name}={value}")
