"""Answers to model calls that have failed: a response, or the last event of a stream."""

from __future__ import annotations

import json

from fastapi.responses import Response

from turnstream_server.gateway.bodies import json_response
from turnstream_server.gateway.proxy.engines import CutStreamError, EngineRefusalError
from turnstream_server.gateway.proxy.errors import openai_error, openai_error_of
from turnstream_server.gateway.proxy.live_answers import JSON, Answer
from turnstream_server.gateway.proxy.sse import event_bytes
from turnstream_server.gateway.proxy.turns import IncompleteError

_OF_BODY = ("content-type", "content-length")


def add_error(answer: Answer, error: Exception) -> None:
    """End an answer with an error: as its response, or as an event if a stream has begun."""
    response = _response_of(error)
    if answer.status:
        answer.add(event_bytes(json.loads(bytes(response.body))))
    else:
        headers = {name: text for name, text in response.headers.items() if name not in _OF_BODY}
        answer.begin(response.status_code, JSON, headers)
        answer.add(bytes(response.body))
    answer.end()


def _response_of(error: Exception) -> Response:
    if isinstance(error, EngineRefusalError):
        return json_response(error.body, status=error.status)
    if not isinstance(error, IncompleteError | CutStreamError):
        return openai_error_of(error)
    response = openai_error(502, f"nothing is stored: {error}", code="incomplete")
    if isinstance(error, IncompleteError) and not error.may_repeat:
        response.headers["x-should-retry"] = "false"
    return response
