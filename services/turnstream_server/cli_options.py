"""What the commands of `turnstream` share: their usual options, and what these stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from turnstream_server.settings import Settings

Redis = Annotated[
    str | None,
    typer.Option("--redis", metavar="URL", help="The store; else TURNSTREAM_REDIS_URL."),
]
RunArgument = Annotated[str, typer.Argument(help="Name of the run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def environment() -> Settings:
    """The settings of the environment.

    Raises:
        InvalidConfigError: names the variable and what is wrong with it.
    """
    from turnstream_server.settings import read_settings

    return read_settings()


def store_url(given: str | None) -> str:
    """The address of the store, from the option `--redis`.

    Raises:
        InvalidConfigError: nothing names a store, or a setting is wrong.
    """
    from turnstream_server import bootstrap

    return bootstrap.store_url(environment(), given)


def console() -> Console:
    """The standard output, for people; what users wrote is never markup on it."""
    from turnstream_server.jobs.screen import Screen

    return Screen()
