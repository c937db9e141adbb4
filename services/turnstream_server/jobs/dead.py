"""The command `turnstream dead`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnstream.errors import InvalidConfigError

Run = Annotated[str, typer.Argument(help="Name of the run.")]
Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[LETTER]...", help="<group>/<sample>/<attempt>, or an event's id."),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Receives the raw records; JSON to be mended, if so named."),
]
Fix = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="The mended letter; checked, and written with --replay."),
]
Replay = Annotated[bool, typer.Option("--replay", help="Write it once more.")]
AsGroup = Annotated[
    str | None,
    typer.Option(metavar="GROUP", help="Replay the named letters as a new group of their own."),
]
Discard = Annotated[bool, typer.Option("--discard", help="End it: the payload goes.")]
Redis = Annotated[
    str | None,
    typer.Option("--redis", metavar="URL", help="The store; else TURNSTREAM_REDIS_URL."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def dead(
    run: Run,
    letters: Names = None,
    out: Out = None,
    fix: Fix = None,
    replay: Replay = False,
    as_group: AsGroup = None,
    discard: Discard = False,
    redis: Redis = None,
    as_json: AsJson = False,
) -> None:
    """List the dead letters of a run, or show, mend, replay or discard one of them."""
    from turnstream_server.jobs import letters as jobs

    names = letters or []
    fixes = fix or []
    wanted = [bool(out), bool(fixes) or replay or as_group is not None, discard]
    if sum(wanted) > 1:
        raise InvalidConfigError("turnstream dead", "one of --out, --fix/--replay and --discard")
    if any(wanted) and not names:
        raise InvalidConfigError("turnstream dead", "name the dead letter")
    if as_group is not None and not replay:
        raise InvalidConfigError("--as-group", "goes with --replay")
    url = _store(redis)
    if out is not None:
        jobs.write_letter(url, run, _one(names), out)
    elif discard:
        typer.echo(f"{jobs.discard(url, run, names)} discarded")
    elif replay:
        for done in jobs.replay(url, run, names, fixes, as_group=as_group):
            typer.echo(jobs.outcome(done))
    elif fixes:
        jobs.check_fix(url, run, names, fixes)
        typer.echo("the fix is sound; nothing was written: say --replay")
    else:
        _look(url, run, names, as_json=as_json)


def _look(url: str, run: str, names: list[str], *, as_json: bool) -> None:
    from turnstream_server.jobs import letters as jobs
    from turnstream_server.jobs.screen import Screen

    if not names and as_json:
        typer.echo(jobs.letters_json(url, run))
    elif not names:
        jobs.print_letters(url, run, Screen())
    for name in names:
        if as_json:
            typer.echo(jobs.letter_json(url, run, name))
        else:
            jobs.print_letter(url, run, name, Screen())


def _one(names: list[str]) -> str:
    if len(names) > 1:
        raise InvalidConfigError("--out", f"is one file for {len(names)} dead letters")
    return names[0]


def _store(given: str | None) -> str:
    from turnstream_server import failpoints
    from turnstream_server.bootstrap import store_url
    from turnstream_server.settings import read_settings

    settings = read_settings()
    failpoints.arm(settings.failpoint)
    return store_url(settings, given)
