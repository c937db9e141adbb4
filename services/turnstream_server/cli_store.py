"""Commands of `turnstream` that look into a store, and change nothing unless they are told to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnstream_server.cli_options import (
    AsJson,
    Redis,
    RunArgument,
    console,
    environment,
    store_url,
)
from turnstream_server.jobs.dead import dead

app = typer.Typer()

PANEL = "A look into a store"


@app.command(rich_help_panel=PANEL)
def runs(redis: Redis = None) -> None:
    """List the runs of a store."""
    from turnstream_server.jobs.runs import print_runs

    print_runs(store_url(redis), console())


@app.command(rich_help_panel=PANEL)
def show(run: RunArgument, redis: Redis = None) -> None:
    """Show how far one run is, and its configuration; `ledger` shows its trajectories."""
    from turnstream_server.jobs.runs import print_run

    print_run(store_url(redis), run, console())


@app.command(rich_help_panel=PANEL)
def ledger(
    run: RunArgument,
    trajectory: Annotated[
        str | None, typer.Argument(help="<group>/<sample>/<attempt>: the life of this one.")
    ] = None,
    redis: Redis = None,
    as_json: AsJson = False,
) -> None:
    """Show where the trajectories of a run are and why, or what became of one of them."""
    from turnstream_server.jobs import ledger as jobs

    url = store_url(redis)
    if trajectory is None and as_json:
        typer.echo(jobs.ledger_json(url, run))
    elif trajectory is None:
        jobs.print_ledger(url, run, console())
    elif as_json:
        typer.echo(jobs.history_json(url, run, trajectory, folder=environment().archive_dir))
    else:
        folder = environment().archive_dir
        jobs.print_history(url, run, trajectory, console(), folder=folder)


app.command(rich_help_panel=PANEL)(dead)


@app.command(rich_help_panel=PANEL)
def why(run: RunArgument, redis: Redis = None, as_json: AsJson = False) -> None:
    """Say why nobody gets data of a run: who waits for whom, the most important reason first."""
    from turnstream_server.jobs import why as jobs

    url = store_url(redis)
    if as_json:
        typer.echo(jobs.reasons_json(url, run))
    else:
        jobs.print_reasons(url, run, console())


@app.command(rich_help_panel=PANEL)
def batch(
    run: RunArgument,
    step: Annotated[int, typer.Argument(min=1, help="Number of the batch.")],
    diff: Annotated[
        int | None, typer.Option(min=1, metavar="STEP", help="Compare with this batch.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Receives the exact bytes of its mini-batches, as Arrow.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="How turns merge, and where trajectories break.")
    ] = False,
    dp_rank: Annotated[int, typer.Option(min=0, help="Whose bytes.")] = 0,
    dp_world_size: Annotated[int, typer.Option(min=1, help="Of so many ranks.")] = 1,
    redis: Redis = None,
    as_json: AsJson = False,
) -> None:
    """Show what one batch of a run is made of, how its turns merge, its bytes, its differences."""
    from turnstream_server.jobs import batches as jobs
    from turnstream_server.jobs import merges

    url, folder = store_url(redis), environment().archive_dir
    if out is not None:
        ranks = {"dp_rank": dp_rank, "dp_world_size": dp_world_size}
        for path in jobs.write_batch(url, run, step, out, **ranks):
            typer.echo(path)
    elif diff is not None and as_json:
        typer.echo(jobs.difference_json(url, run, step, diff, folder=folder))
    elif diff is not None:
        jobs.print_difference(url, run, step, diff, console(), folder=folder)
    elif merge and as_json:
        typer.echo(merges.merge_json(url, run, step))
    elif merge:
        merges.print_merge(url, run, step, console())
    elif as_json:
        typer.echo(jobs.batch_json(url, run, step, folder=folder))
    else:
        jobs.print_batch(url, run, step, console(), folder=folder)


@app.command(rich_help_panel=PANEL)
def archive(
    run: RunArgument,
    folder: Annotated[Path, typer.Option("--to", help="Receives a Parquet file for every step.")],
    redis: Redis = None,
) -> None:
    """Write every step that is committed and still retained as Parquet."""
    from turnstream_server.jobs.archives import archive_run

    for path in archive_run(store_url(redis), run, folder):
        typer.echo(path)


@app.command(rich_help_panel=PANEL)
def config() -> None:
    """Print the settings of this environment, one variable a line."""
    for name, value in environment().printable().items():
        typer.echo(f"{name}={value}")


@app.command(rich_help_panel=PANEL)
def evals(run: RunArgument, redis: Redis = None, as_json: AsJson = False) -> None:
    """Show what the evaluations of a run gave, for each version of the weights."""
    from turnstream_server.jobs import evals as jobs

    if as_json:
        typer.echo(jobs.evals_json(store_url(redis), run))
    else:
        jobs.print_evals(store_url(redis), run, console())
