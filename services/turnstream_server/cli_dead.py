"""The commands `turnstream dead ...`: what was set aside as damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnstream_server.cli_options import AsJson, Redis, RunArgument, console, group, say, store_url

app = group("Dead letters: trajectories and events that were set aside as damaged.")

Letter = Annotated[
    str, typer.Argument(metavar="LETTER", help="<group>/<sample>/<attempt>, or an event's id.")
]
Letters = Annotated[
    list[str], typer.Argument(metavar="LETTER...", help="Names as `dead list` prints them.")
]


@app.command("list")
def list_(run: RunArgument, redis: Redis = None, as_json: AsJson = False) -> None:
    """List the dead letters of a run."""
    from turnstream_server.jobs import letters as jobs

    if as_json:
        typer.echo(jobs.letters_json(store_url(redis), run))
    else:
        jobs.print_letters(store_url(redis), run, console())


@app.command()
def show(run: RunArgument, letters: Letters, redis: Redis = None, as_json: AsJson = False) -> None:
    """Show what is wrong with dead letters, byte by byte."""
    from turnstream_server.jobs import letters as jobs

    url = store_url(redis)
    for name in letters:
        if as_json:
            typer.echo(jobs.letter_json(url, run, name))
        else:
            jobs.print_letter(url, run, name, console())


@app.command()
def export(
    run: RunArgument,
    letter: Letter,
    out: Annotated[
        Path,
        typer.Option("--to", metavar="FILE", help="Raw records; a name in .json: to be edited."),
    ],
    redis: Redis = None,
    as_json: AsJson = False,
) -> None:
    """Write the bytes of a dead letter to a file."""
    from turnstream_server.jobs import letters as jobs

    jobs.write_letter(store_url(redis), run, letter, out)
    say(f"{letter} is written to {out}", as_json=as_json, letter=letter, file=str(out))


@app.command()
def replay(
    run: RunArgument,
    letters: Letters,
    fix: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="The edited letter, as JSON.")
    ] = None,
    as_group: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Write them as a new group of this name.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the fix, and write nothing.")
    ] = False,
    redis: Redis = None,
    as_json: AsJson = False,
) -> None:
    """Write dead letters to the run once more."""
    from turnstream_server.jobs import letters as jobs

    url, fixes = store_url(redis), fix or []
    if dry_run:
        jobs.check_fix(url, run, letters, fixes)
        say("the fix is sound; nothing was written", as_json=as_json, sound=True)
        return
    done = [jobs.outcome(each) for each in jobs.replay(url, run, letters, fixes, as_group=as_group)]
    say("\n".join(done), as_json=as_json, replayed=done)


@app.command()
def discard(
    run: RunArgument, letters: Letters, redis: Redis = None, as_json: AsJson = False
) -> None:
    """Delete the payload of dead letters."""
    from turnstream_server.jobs import letters as jobs

    done = jobs.discard(store_url(redis), run, letters)
    say(f"{done} discarded", as_json=as_json, discarded=letters)
