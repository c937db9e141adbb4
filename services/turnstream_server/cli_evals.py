"""The command `turnstream evals`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer


def add_evals(app: typer.Typer, *, store_url: Callable[[str | None], str], panel: str) -> None:
    """Add it.

    Args:
        app: of the command line.
        store_url: gives the address of the store, from the option `--redis`.
        panel: of the help that lists it.
    """

    @app.command(rich_help_panel=panel)
    def evals(
        run: Annotated[str, typer.Argument(help="Name of the run.")],
        redis: Annotated[
            str | None,
            typer.Option("--redis", metavar="URL", help="The store; else TURNSTREAM_REDIS_URL."),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Show what the evaluations of a run gave, for each version of the weights."""
        from rich.console import Console

        from turnstream_server.jobs import evals as jobs

        if as_json:
            typer.echo(jobs.evals_json(store_url(redis), run))
        else:
            jobs.print_evals(store_url(redis), run, Console())
