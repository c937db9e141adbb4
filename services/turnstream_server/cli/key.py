"""The commands `turnstream key ...`: API keys for batcher and gateway."""

from __future__ import annotations

from typing import Annotated

import typer

from turnstream_server.cli.options import group, output, say, store_url
from turnstream_server.options import AsJson, Redis

app = group("API keys for batcher and gateway.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, for people.")]


@app.command()
def create(
    name: Name,
    role: Annotated[
        list[str],
        typer.Option(metavar="ROLE", help="produce, train, read or admin; may be repeated."),
    ],
    run: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="A run that it may use; may be repeated. Default: all."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time until it expires: 12h, 30d, 8w.")
    ] = None,
    requests_per_s: Annotated[
        float | None,
        typer.Option(metavar="N", help="Requests per second, in each gateway and batcher."),
    ] = None,
    bytes_per_s: Annotated[
        float | None, typer.Option(metavar="N", help="Bytes of requests per second.")
    ] = None,
    max_body_bytes: Annotated[
        int | None, typer.Option(metavar="N", help="Largest body of one request.")
    ] = None,
    redis: Redis = "",
    as_json: AsJson = False,
) -> None:
    """Create a key, and print it. It is not stored: only its hash is."""
    from turnstream_server.console import key_commands as command
    from turnstream_server.keys.records import KeyLimits

    limits = KeyLimits(requests_per_s, bytes_per_s, max_body_bytes)
    secret = command.create(
        store_url(redis), name, roles=role, runs=run or [], expires=expires, limits=limits
    )
    say(secret, as_json=as_json, name=name, key=secret)


@app.command("list")
def list_(redis: Redis = "", as_json: AsJson = False) -> None:
    """List all keys, without the keys themselves."""
    from turnstream_server.console import key_commands as command

    output(command.read_keys(store_url(redis)), command.print_keys, as_json=as_json)


@app.command()
def revoke(name: Name, redis: Redis = "", as_json: AsJson = False) -> None:
    """Delete a key. Requests with it are refused a second later."""
    from turnstream_server.console import key_commands as command

    command.revoke(store_url(redis), name)
    say(f"key {name} is revoked", as_json=as_json, name=name)
