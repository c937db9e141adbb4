"""Settings, the address of the store, and output, for all commands of `turnstream`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from turnstream_server.settings import Settings


def group(help_: str) -> typer.Typer:
    """Return a group of commands, which prints its help when it is called without one."""
    return typer.Typer(
        help=help_, no_args_is_help=True, rich_markup_mode="rich", add_completion=False
    )


def environment() -> Settings:
    """Return the settings of the environment."""
    from turnstream_server.settings import read_settings

    return read_settings()


def store_url(given: str) -> str:
    """Return the address of the store, from the option `--redis` or the environment."""
    from turnstream_server import failpoints, waits

    settings = environment()
    failpoints.arm(settings.failpoint)
    return waits.store_url(settings, given)


def console() -> Console:
    """Return the standard output, on which no text of a user is markup."""
    from turnstream_server.screen import Screen

    return Screen()


def say(sentence: str, *, as_json: bool, **facts: Any) -> None:
    """Print the result of a command: a sentence, or the same facts as JSON."""
    typer.echo(json.dumps(facts, indent=2) if as_json else sentence)


def output(
    content: Any,
    print_content: Callable[[Any, Console], None],
    *,
    as_json: bool,
    ensure_ascii: bool = True,
) -> None:
    """Print the content of a store as a table, or as JSON."""
    if as_json:
        typer.echo(json.dumps(content, indent=2, ensure_ascii=ensure_ascii))
    else:
        print_content(content, console())


@contextmanager
def interruptible() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C in the block; both print "interrupted" and exit with status 130."""
    from turnstream_server.launch.stack import terminate_as_interrupt

    try:
        with terminate_as_interrupt():
            yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
