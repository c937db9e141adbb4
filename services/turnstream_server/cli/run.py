"""The commands `turnstream run ...`: runs, their settings, and their beginning and end."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnstream.errors import InvalidConfigError, UnknownFormatError
from turnstream_server.cli.options import group, output, say, store_url
from turnstream_server.options import AsJson, Redis, RunArgument

if TYPE_CHECKING:
    from turnstream.types import RecoveryToken
    from turnstream_server.console.run_commands import RunCommand

app = group("Runs: create, read, change, end.")

Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting and its value; may be repeated."),
]
Reason = Annotated[str, typer.Option(help="Stored with the run and shown to programs that wait.")]


@app.command()
def create(
    run: RunArgument,
    settings: Assignments = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="All settings, as JSON.")
    ] = None,
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Create a run. A run of this name with the same settings is accepted."""
    from turnstream_server.console.run_commands import create

    name = create(store_url(redis), run, settings or [], config_file)
    say(f"run {name} is ready", as_json=as_json, run=name)


@app.command("list")
def list_(redis: Redis = "", as_json: AsJson = False) -> None:
    """List the runs of a store."""
    from turnstream_server.console import runs as command

    url = store_url(redis)
    output(command.read_runs(url), functools.partial(command.print_runs, url), as_json=as_json)


@app.command()
def show(
    run: RunArgument,
    show_all: Annotated[
        bool, typer.Option("--all", help="Every setting, also those at their default.")
    ] = False,
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Show the progress, the last batch and the settings of a run."""
    from turnstream_server.console import runs as command

    print_run = functools.partial(command.print_run, show_all=show_all)
    output(command.read_run(store_url(redis), run), print_run, as_json=as_json)


@app.command()
def revise(
    run: RunArgument,
    settings: Assignments,
    from_step: Annotated[
        int, typer.Option(min=1, help="First step with the new settings; it is not planned yet.")
    ],
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Change settings of a run from a step on."""
    from turnstream_server.console.run_commands import revise_run

    lines = [*revise_run(store_url(redis), run, settings or [], from_step=from_step)]
    say("\n".join(lines), as_json=as_json, run=run, from_step=from_step, changes=lines[1:])


@app.command()
def pause(
    run: RunArgument, reason: Reason = "", redis: Redis = "", as_json: AsJson = False
) -> None:
    """Admit no new group and plan no batch; open groups and planned batches continue."""
    _change_state(redis, run, "pause", "paused", as_json=as_json, reason=reason)


@app.command()
def resume(run: RunArgument, redis: Redis = "", as_json: AsJson = False) -> None:
    """End a pause."""
    _change_state(redis, run, "resume", "open", as_json=as_json)


@app.command("remove-observer")
def remove_observer(
    run: RunArgument,
    observer: Annotated[str, typer.Argument(help="Its name: `turnstream run show` lists all.")],
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Remove an observer, so that no step is kept for it. A running one gets an error."""
    from turnstream_server.console.run_commands import remove_observer as remove

    words = remove(store_url(redis), run, observer)
    say(words, as_json=as_json, run=run, observer=observer)


@app.command()
def close(
    run: RunArgument,
    leftover: Annotated[
        str | None,
        typer.Option(
            help="Complete groups that fill no whole batch: train a `short` one, `carry` them to "
            "a reopened run, or `drop` them."
        ),
    ] = None,
    reason: Reason = "",
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Admit no new group, and end the run when its open groups are decided."""
    options = {"reason": reason, "leftover": leftover}
    _change_state(redis, run, "close", "closed", as_json=as_json, **options)


@app.command()
def reopen(run: RunArgument, redis: Redis = "", as_json: AsJson = False) -> None:
    """Admit groups to a closed run again."""
    _change_state(redis, run, "reopen", "open", as_json=as_json)


@app.command()
def fork(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run to copy; it stays as it is.")],
    new_run: Annotated[str, typer.Argument(metavar="NEW", help="Name of the new run.")],
    token_file: Annotated[
        Path | None, typer.Option(help="File with the recovery token of a checkpoint.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="A committed step, in place of a token.")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Other settings, as JSON.")
    ] = None,
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Start a new run from a checkpoint of another one."""
    from turnstream.records.configs import decode_config
    from turnstream.store.client.connection import connect
    from turnstream_server.ledger.admin.forks import fork_run, token_of_step

    if (token_file is None) == (step is None):
        raise InvalidConfigError("--token-file", "use either --token-file or --step")
    config = None if config_file is None else decode_config(config_file.read_text())
    with connect(store_url(redis)) as client:
        token = _read_token(token_file) if token_file else token_of_step(client, run, step or 0)
        fork_run(client, run, new_run, token, config=config)
    say(
        f"{new_run} continues from step {token.step} of {run}; start its trainer with {token}",
        as_json=as_json,
        run=new_run,
        token=str(token),
    )


@app.command()
def replan(
    run: RunArgument,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the batcher that plans the run.")
    ] = 60.0,
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Plan again from the first step with damaged payload.

    The damaged trajectories become dead letters. The trainer session ends; restart the trainer with
    its recovery token.
    """
    from turnstream_server.console.run_commands import replan

    done = replan(store_url(redis), run, wait_s=wait_s)
    say(f"planned again: {done}", as_json=as_json, run=run, steps=done)


@app.command()
def delete(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for the name again.")] = False,
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Delete everything that the store holds of a run."""
    from turnstream.store.client.connection import connect
    from turnstream_server.ledger.admin.deletion import delete_run

    url = store_url(redis)
    if not yes and typer.prompt(f"This deletes all data of {run}. Type its name again") != run:
        typer.echo("the name differs: nothing was deleted", err=True)
        raise typer.Exit(1)
    with connect(url) as client:
        done = delete_run(client, run)
    say(
        f"deleted {', '.join(done.runs)}; the name can be used again",
        as_json=as_json,
        deleted=[*done.runs],
    )


def _change_state(
    redis: str, run: str, command: RunCommand, state: str, *, as_json: bool, **options: str | None
) -> None:
    from turnstream_server.console.run_commands import change_state

    done = change_state(store_url(redis), run, command, **options)
    say(done, as_json=as_json, run=run, state=state)


def _read_token(path: Path) -> RecoveryToken:
    from turnstream.types import RecoveryToken

    text = path.read_text(encoding="utf-8").strip()
    try:
        return RecoveryToken.parse(text)
    except UnknownFormatError:
        raise
    except ValueError as error:
        raise InvalidConfigError("--token-file", f"{text!r} is not a recovery token") from error
