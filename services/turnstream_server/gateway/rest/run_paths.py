"""The run in the path of a request: a name with any character, or the id of one run.

`/v1/runs/maze` is the run that has this name now. `/v1/runs/maze~2` is the second run of the name,
and `/v1/runs/maze~1` the first one, also after its deletion.

A server decodes the path before it finds the route, so a `/` of the name would separate two parts
of the path. `RunPathApp` puts `SLASH` in its place, and `with_slashes` the `/` again.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from turnstream.types.names import RunId

SLASH: Final = "\udc2f"
"""Half a surrogate pair, which no name can have."""

_RUN: Final = 3
"""Place of the run among the parts of a raw path: `/v1/runs/<run>`."""


class RunPathApp:
    """An application whose routes receive the encoded slashes in the name of a run as `SLASH`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        raw: bytes = scope.get("raw_path") or b""
        if scope["type"] == "http" and b"%2f" in raw.lower():
            scope = {**scope, "path": decoded_path(raw)}
        await self._app(scope, receive, send)


def decoded_path(raw: bytes) -> str:
    """Return a path in which the encoded slashes of the run are `SLASH`.

    >>> decoded_path(b"/v1/runs/a%2Fb/trajectories/c%2Fd/0").replace(SLASH, "|")
    '/v1/runs/a|b/trajectories/c/d/0'
    """
    parts = [unquote(part.decode("ascii")) for part in raw.split(b"/")]
    if len(parts) > _RUN and parts[_RUN - 1] == "runs":
        parts[_RUN] = parts[_RUN].replace("/", SLASH)
    return "/".join(parts)


def with_slashes(part: str) -> str:
    """Return a part of a path with `/` in place of `SLASH`."""
    return part.replace(SLASH, "/")


def path_run(part: str) -> str:
    """Return the name in a part of a path; a RunId for the id of one run.

    >>> path_run("a" + SLASH + "b"), path_run("maze"), path_run("maze~1"), path_run("maze~2")
    ('a/b', 'maze', 'maze', 'maze~2')
    >>> type(path_run("maze")).__name__, type(path_run("maze~1")).__name__
    ('str', 'RunId')
    """
    text = with_slashes(part)
    name = text.removesuffix("~1")
    if name and name != text:
        return RunId.of(name, 1)
    run = RunId(text)
    return run if run.incarnation > 1 else text
