"""Errors of the capture proxy, in the shapes that the clients of OpenAI and Anthropic read.

    {"error": {"message": "...", "type": "rate_limit_error", "param": null, "code": "not-ready"}}

`code` is the name of the problem type of our own errors, as in `gateway/rest/problems.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from fastapi.responses import Response

from turnstream.http.problems import problem_name
from turnstream_server.gateway.bodies import json_response
from turnstream_server.gateway.proxy.answers import message_of
from turnstream_server.gateway.rest.problems import problem_of

ANTHROPIC: Final = "/anthropic"
"""First part of the paths of the API of Anthropic."""

SESSION_PATHS: Final = ("/openai/", f"{ANTHROPIC}/")
"""First characters of the paths that need a session key."""

PATHS: Final = (*SESSION_PATHS, "/t/")
"""First characters of all paths whose errors have a shape of an agent's API."""

HOW_TO_OPEN: Final = (
    "open a session with POST /v1/runs/{run}/sessions and send its key, or call "
    "/t/{run}/{group}/{sample}/v1 with an API key of the role produce"
)

_BODY_HEADERS: Final = ("content-type", "content-length")

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES: Final = {**_TYPES, 413: "request_too_large", 504: "timeout_error"}


def error_content(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Return an error as JSON, for a body or an event of a stream.

    >>> error_content(404, "no such model", code="model_not_found")["error"]["type"]
    'not_found_error'
    """
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def openai_error(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    retry_after_s: float | None = None,
) -> Response:
    """Return the response with an error.

    `retry_after_s` is when the same request may pass. Clients repeat 409 too, unless a header
    forbids it.
    """
    answer = json_response(error_content(status, message, code=code, param=param), status=status)
    if retry_after_s is not None:
        answer.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    elif status == 409:
        answer.headers["x-should-retry"] = "false"
    if status == 401:
        answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def openai_error_of(error: Exception) -> Response:
    """Return the response with one of our errors; 500 without its text for any other."""
    problem = problem_of(error)
    return openai_error(
        problem.status,
        problem.detail,
        code=problem_name(problem.model_dump()),
        param=problem.field,
        retry_after_s=problem.retry_after_s,
    )


def anthropic_content(status: int, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an error in the shape of OpenAI, or of an engine, in that of Anthropic.

    >>> anthropic_content(404, {"error": {"message": "no such model"}})["error"]
    {'type': 'not_found_error', 'message': 'no such model'}
    """
    default = "api_error" if status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(status, default)
    return {"type": "error", "error": {"type": kind, "message": message_of(content)}}


def shaped_for(path: str, answer: Response) -> Response:
    """Return a response with an error in the shape of the API of a path."""
    if not path.startswith(f"{ANTHROPIC}/"):
        return answer
    content = anthropic_content(answer.status_code, json.loads(bytes(answer.body)))
    shaped = json_response(content, status=answer.status_code)
    shaped.headers.update(headers_of(answer))
    return shaped


def headers_of(answer: Response) -> dict[str, str]:
    """Return the headers of a response but for those of its body."""
    return {name: text for name, text in answer.headers.items() if name not in _BODY_HEADERS}
