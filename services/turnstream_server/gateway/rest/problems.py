"""Problem documents (RFC 9457): the one table from errors to statuses of the REST API.

A document has `type`, `title`, `status` and `detail`. `field` and `value` name a wrong part of the
request; `retry_after_s` and the header Retry-After are there where the same request may pass later.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NamedTuple

from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel

from turnstream import errors
from turnstream.types.names import shown
from turnstream_server.bus.queries.trajectory_history import TrajectoryNotFoundError
from turnstream_server.logs import plain

MEDIA_TYPE: Final = "application/problem+json"
_TYPE: Final = "https://turnstream.dev/problems/"
_LONGEST_VALUE: Final = 80
"""Characters of a list, an object or a text that a document quotes as it was sent."""


class _Kind(NamedTuple):
    status: int
    name: str
    title: str


_NOT_FOUND: Final = _Kind(404, "not-found", "There is no such thing")
_KINDS: Final[tuple[tuple[type[Exception], _Kind], ...]] = (
    (errors.UnknownKeyError, _Kind(401, "unknown-key", "The key is not accepted")),
    (errors.AccessDeniedError, _Kind(403, "access-denied", "The key does not allow this")),
    (errors.RunNotFoundError, _NOT_FOUND),
    (TrajectoryNotFoundError, _NOT_FOUND),
    (errors.ReleasedError, _Kind(410, "released", "It is no longer retained")),
    (errors.EndOfRunError, _Kind(409, "end-of-run", "The run is closed")),
    (errors.PromptsExhaustedError, _Kind(409, "prompts-exhausted", "Every prompt is done")),
    (errors.GroupTooLargeError, _Kind(422, "group-too-large", "It is above its limit")),
    (errors.ConflictError, _Kind(409, "conflict", "Another content is stored")),
    (errors.FencedError, _Kind(409, "fenced", "Another owner has taken over")),
    (errors.TurnGapError, _Kind(409, "turn-gap", "An earlier turn is missing")),
    (errors.RejectedError, _Kind(409, "rejected", "The request is refused")),
    (errors.StoreFullError, _Kind(429, "store-full", "The store has no memory left")),
    (errors.NotReadyError, _Kind(429, "not-ready", "Not now")),
    (errors.UnavailableError, _Kind(503, "unavailable", "A service is away")),
    (errors.RecordError, _Kind(400, "unreadable", "The body cannot be read")),
    (errors.UnsafeStoreError, _Kind(503, "unsafe-store", "The store would lose data")),
    (errors.BatchingError, _Kind(422, "invalid", "A field has a wrong value")),
)
"""The first type that fits counts."""


class Problem(BaseModel):
    """An error, as RFC 9457 describes it."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None
    value: Any = None
    retry_after_s: float | None = None


def problem_of(error: Exception) -> Problem:
    """Return the document of an error. An error with `retry_after_s` is 429, not 409.

    >>> problem_of(errors.InvalidTurnError("logprobs", "3 values for 4 tokens")).field
    'logprobs'
    >>> problem_of(errors.ReleasedError("run 'a': step 3 is no longer retained")).status
    410
    """
    kind = next((each for type_, each in _KINDS if isinstance(error, type_)), None)
    if kind is None:
        kind, detail = _Kind(500, "internal", "Internal error"), type(error).__name__
    else:
        detail = str(error)
    retry_after_s = getattr(error, "retry_after_s", None)
    status = 429 if retry_after_s is not None and kind.status == 409 else kind.status
    return Problem(
        type=_TYPE + kind.name,
        title=kind.title,
        status=status,
        detail=detail,
        field=getattr(error, "field", None),
        retry_after_s=retry_after_s,
    )


def invalid_request(error: RequestValidationError) -> Problem:
    """Return the document of a request that does not fit its declaration."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    value = first.get("input")
    if isinstance(value, list | dict | str | bytes) and len(text := shown(value)) > _LONGEST_VALUE:
        value = text  # the value may be the whole body
    value = jsonable_encoder(value, custom_encoder={bytes: shown})
    return Problem(
        type=_TYPE + "invalid",
        title="A field has a wrong value",
        status=422,
        detail=f"{field}: {first['msg']}",
        field=field,
        value=value,
    )


def response(problem: Problem) -> Response:
    """Return the response with a document."""
    headers = {}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    content = plain(problem.model_dump(exclude_none=True))
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return Response(body, problem.status, headers=headers, media_type=MEDIA_TYPE)
