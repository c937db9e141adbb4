"""The version of a request of the SDK: see `turnstream.http.problems`."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstream.http.problems import HEADER, WIRE_PROBLEM, WIRE_VERSION, refused_version
from turnstream_server.gateway.rest.problems import Problem, problem_type, response

_STATUS: Final = 400


class WireVersionApp:
    """An application that refuses requests of an unknown version, and names its own in answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; 400 for one of another version."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def versioned(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = str(WIRE_VERSION)
            await send(message)

        text = refused_version(Headers(scope=scope).get(HEADER))
        app = response(_refusal(text)) if text else self._app
        await app(scope, receive, versioned)


def _refusal(text: str) -> Problem:
    title = "The version of the request is unknown"
    return Problem(type=problem_type(WIRE_PROBLEM), title=title, status=_STATUS, detail=text)
