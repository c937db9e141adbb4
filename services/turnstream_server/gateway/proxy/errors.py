"""Errors of the capture proxy, in the shape that the clients of OpenAI read.

    {"error": {"message": "...", "type": "rate_limit_error", "param": null, "code": "not-ready"}}

`code` is the name of the problem type of our own errors, as in `gateway/rest/problems.py`.
"""

from __future__ import annotations

import math
from typing import Any, Final

from fastapi.responses import Response

from turnstream.http.problems import problem_name
from turnstream_server.gateway.bodies import json_response
from turnstream_server.gateway.rest.problems import problem_of

SESSION_PATHS: Final = ("/openai/", "/anthropic/")
"""First characters of the paths that need a session key."""

PATHS: Final = (*SESSION_PATHS, "/t/")
"""First characters of all paths whose errors have this shape."""

HOW_TO_OPEN: Final = (
    "open a session with POST /v1/runs/{run}/sessions and send its key, or call "
    "/t/{run}/{group}/{sample}/v1 with an API key of the role produce"
)

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


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
