"""The commands `turnstream dead ...`: trajectories and events that were set aside as damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnstream_server.cli.options import console, group, output, say, store_url
from turnstream_server.options import AsJson, Redis, RunArgument

app = group("Dead letters: trajectories and events that were set aside as damaged.")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="<group>/<sample>/<attempt>, or an event's id.")
]
Names = Annotated[
    list[str], typer.Argument(metavar="NAME...", help="Names as `dead list` prints them.")
]


@app.command("list")
def list_(run: RunArgument, redis: Redis = "", as_json: AsJson = False) -> None:
    """List the dead letters of a run."""
    from turnstream_server.console import dead_letters as command

    content = command.list_dead_letters(store_url(redis), run)
    output(content, command.print_dead_letters, as_json=as_json)


@app.command()
def show(run: RunArgument, names: Names, redis: Redis = "", as_json: AsJson = False) -> None:
    """Show dead letters, with the defect of each record."""
    from turnstream_server.console import dead_letters as command

    url = store_url(redis)
    for name in names:
        if as_json:
            typer.echo(command.dead_letter_json(url, run, name))
        else:
            command.print_dead_letter(url, run, name, console())


@app.command()
def export(
    run: RunArgument,
    name: Name,
    out: Annotated[Path, typer.Option("--to", metavar="FILE", help="The JSON file to write.")],
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Write everything that is stored of a dead letter to a file, as JSON."""
    from turnstream_server.console import dead_letters as command

    out.write_text(command.dead_letter_json(store_url(redis), run, name), encoding="utf-8")
    say(f"{name} is written to {out}", as_json=as_json, name=name, file=str(out))


@app.command()
def discard(run: RunArgument, names: Names, redis: Redis = "", as_json: AsJson = False) -> None:
    """Delete the payload of dead letters; the reasons stay."""
    from turnstream_server.console import dead_letters as command

    done = command.discard(store_url(redis), run, names)
    say(f"{done} discarded", as_json=as_json, discarded=names)
