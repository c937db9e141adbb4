"""Commands of `turnstream` that change the life of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from turnstream_server.cli_options import AsJson, Redis, RunArgument, store_url

app = typer.Typer()

PANEL = "The life of a run"


@app.command(rich_help_panel=PANEL)
def close(
    run: RunArgument,
    leftover: Annotated[
        str | None,
        typer.Option(
            help="Of groups that make no whole batch: a short one, carry them, or drop them."
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="Kept with the run.")] = "",
    redis: Redis = None,
) -> None:
    """Take no new group any more, and end when the groups that are open are decided."""
    from turnstream_server.jobs.life import close

    typer.echo(close(store_url(redis), run, reason, leftover))


@app.command(rich_help_panel=PANEL)
def reopen(run: RunArgument, redis: Redis = None) -> None:
    """Let a closed run take groups again; what was carried is planned with them."""
    from turnstream_server.jobs.life import reopen

    typer.echo(reopen(store_url(redis), run))


@app.command(rich_help_panel=PANEL)
def pause(
    run: RunArgument,
    reason: Annotated[str, typer.Option(help="What whoever waits is told.")] = "",
    redis: Redis = None,
) -> None:
    """Take no new group and plan no batch; what is open or planned goes on."""
    from turnstream_server.jobs.life import pause

    typer.echo(pause(store_url(redis), run, reason))


@app.command(rich_help_panel=PANEL)
def resume(run: RunArgument, redis: Redis = None) -> None:
    """Let a paused run go on."""
    from turnstream_server.jobs.life import resume

    typer.echo(resume(store_url(redis), run))


@app.command(rich_help_panel=PANEL)
def replan(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option(min=1, help="The damaged step; else the first that is.")
    ] = None,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Seconds in which the batcher that plans the run answers.")
    ] = 60.0,
    redis: Redis = None,
    as_json: AsJson = False,
) -> None:
    """Plan again from a step on whose payload was damaged, without it.

    What is damaged becomes dead letters. The trainer session ends, and begins again with its token.
    """
    from turnstream_server.jobs.replanning import replan, replanned_json, replanned_text

    done = replan(store_url(redis), run, step, wait_s=wait_s)
    typer.echo(replanned_json(run, done) if as_json else f"planned again: {replanned_text(done)}")


@app.command(rich_help_panel=PANEL)
def revise(
    run: RunArgument,
    settings: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="A setting and its value.")
    ],
    from_step: Annotated[int, typer.Option(min=1, help="The first step that is planned with it.")],
    redis: Redis = None,
) -> None:
    """Change settings of a run from a step on that is not planned yet, and show the changes."""
    from turnstream_server.jobs.life import revise_run

    for line in revise_run(store_url(redis), run, settings, from_step=from_step):
        typer.echo(line)
