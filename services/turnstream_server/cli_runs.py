"""Commands that make or end a run from outside: `turnstream fork` and `delete`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnstream.errors import InvalidConfigError
from turnstream_server.cli_options import Redis, RunArgument

if TYPE_CHECKING:
    from turnstream.types import RecoveryToken

app = typer.Typer()

_PANEL = "The life of a run"


@app.command(rich_help_panel=_PANEL)
def delete(
    run: RunArgument,
    redis: Redis = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for the name again.")] = False,
) -> None:
    """Remove everything that the store holds of a run, or finish an interrupted deletion."""
    from turnstream.store.connection import connect
    from turnstream_server import bootstrap
    from turnstream_server.bus.deletion import delete_run

    url = bootstrap.store_url_of_job(redis)
    if not yes and typer.prompt(f"Nothing of {run} can be read again. Its name once more") != run:
        typer.echo("another name: nothing was deleted", err=True)
        raise typer.Exit(1)
    with connect(url) as client:
        done = delete_run(client, run)
    typer.echo(f"deleted {', '.join(done.runs)}; the name can be used again")


@app.command(rich_help_panel=_PANEL)
def fork(
    run: Annotated[str, typer.Argument(help="The run that goes on as it is.")],
    new_run: Annotated[str, typer.Argument(help="Name of the new run.")],
    token_file: Annotated[
        Path | None, typer.Option(help="File that holds the checkpoint's recovery token.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="A committed step, in place of a token.")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Configuration as JSON; else the run's own.")
    ] = None,
    redis: Redis = None,
) -> None:
    """Make a run that goes on from a checkpoint of another one, which goes on too."""
    from turnstream.records.configs import decode_config
    from turnstream.store.connection import connect
    from turnstream_server import bootstrap
    from turnstream_server.bus.forks import fork_run, token_of_step

    if (token_file is None) == (step is None):
        raise InvalidConfigError("--token-file", "name either a token or a --step")
    url = bootstrap.store_url_of_job(redis)
    config = None if config_file is None else decode_config(config_file.read_text())
    with connect(url) as client:
        token = _read_token(token_file) if token_file else token_of_step(client, run, step or 0)
        fork_run(client, run, new_run, token, config=config)
    typer.echo(
        f"{new_run} goes on from step {token.step} of {run}; its trainer starts with {token}"
    )


def _read_token(path: Path) -> RecoveryToken:
    from turnstream.types import RecoveryToken

    text = path.read_text(encoding="utf-8").strip()
    try:
        return RecoveryToken.parse(text)
    except ValueError as error:
        raise InvalidConfigError("--token-file", f"{text!r} is not a recovery token") from error
