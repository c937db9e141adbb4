"""Answers to model calls that have failed: a response, or the last event of a stream."""

from __future__ import annotations

import json

from fastapi.responses import Response

from turnstream_server.gateway.bodies import json_response
from turnstream_server.gateway.proxy.answer_blocks import AnswerFormat
from turnstream_server.gateway.proxy.engines import CutStreamError, EngineRefusalError
from turnstream_server.gateway.proxy.errors import headers_of, openai_error, openai_error_of
from turnstream_server.gateway.proxy.live_answers import JSON, Answer, json_bytes
from turnstream_server.gateway.proxy.turns import IncompleteError


def add_error(answer: Answer, error: Exception, form: AnswerFormat) -> None:
    """End an answer with an error: the response itself, or an event of a started stream."""
    response = _response_of(error)
    status, content = response.status_code, json.loads(bytes(response.body))
    if answer.status:
        answer.add(form.error_event(status, content))
    else:
        answer.begin(status, JSON, headers_of(response))
        answer.add(json_bytes(form.error(status, content)))
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
