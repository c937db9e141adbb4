"""Commands that make or end a run from outside: `turnstream delete`."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer()

_PANEL = "The life of a run"

_Redis = Annotated[
    str | None,
    typer.Option("--redis", metavar="URL", help="The store; else TURNSTREAM_REDIS_URL."),
]


@app.command(rich_help_panel=_PANEL)
def delete(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    redis: _Redis = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for the name again.")] = False,
) -> None:
    """Remove everything that the store holds of a run; to be repeated where it was interrupted."""
    from turnstream.store.connection import connect
    from turnstream_server import bootstrap
    from turnstream_server.bus.deletion import delete_run

    url = bootstrap.store_url_of_job(redis)
    if not yes and typer.prompt(f"Nothing of {run} can be read again. Its name once more") != run:
        typer.echo("another name: nothing was deleted", err=True)
        raise typer.Exit(1)
    with connect(url) as client:
        done = delete_run(client, run)
    typer.echo(f"deleted {run}; its name may be used again in {done.free_after_s:.0f} s")
