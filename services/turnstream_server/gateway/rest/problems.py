"""Problem documents (RFC 9457): the one table from errors to statuses of the REST API.

A document has `type`, `title`, `status` and `detail`. `field` and `value` name a wrong part of the
request; `retry_after_s` and the header Retry-After are there where the same request may pass later.
`reasons` say why a request has to wait. The SDK turns a document into the same error again: see
`turnstream.http.problems`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, Field

from turnstream import errors
from turnstream.http.problems import MEDIA_TYPE, TYPE_PREFIX
from turnstream.types.names import quoted
from turnstream_server.ledger.queries.trajectory_history import TrajectoryNotFoundError
from turnstream_server.logs import plain

_LONGEST_VALUE: Final = 80
"""Characters of a list, an object or a text that a document quotes as it was sent."""


class _Kind(NamedTuple):
    status: int
    name: str
    title: str


_NOT_FOUND: Final = _Kind(404, "not-found", "There is no such thing")
KINDS: Final[tuple[tuple[type[Exception], _Kind], ...]] = (
    (errors.UnknownKeyError, _Kind(401, "unknown-key", "The key is not accepted")),
    (errors.AccessDeniedError, _Kind(403, "access-denied", "The key does not allow this")),
    (errors.RunNotFoundError, _NOT_FOUND),
    (TrajectoryNotFoundError, _NOT_FOUND._replace(name="trajectory-not-found")),
    (errors.ReleasedError, _Kind(410, "released", "It is no longer retained")),
    (errors.EndOfRunError, _Kind(409, "end-of-run", "The run is closed")),
    (errors.PromptsExhaustedError, _Kind(409, "prompts-exhausted", "Every prompt is done")),
    (errors.GroupTooLargeError, _Kind(422, "group-too-large", "It is above its limit")),
    (errors.ConflictError, _Kind(409, "conflict", "Another content is stored")),
    (errors.FencedError, _Kind(409, "fenced", "Another owner has taken over")),
    (errors.TurnGapError, _Kind(409, "turn-gap", "An earlier turn is missing")),
    (errors.StoreBehindError, _Kind(409, "store-behind", "The store is an older copy")),
    (errors.ObserverExpiredError, _Kind(409, "observer-expired", "The observer has expired")),
    (errors.RejectedError, _Kind(409, "rejected", "The request is refused")),
    (errors.StoreFullError, _Kind(429, "store-full", "The store has no memory left")),
    (errors.NotReadyError, _Kind(429, "not-ready", "Not now")),
    (errors.BatcherUnavailableError, _Kind(503, "batcher-unavailable", "No batcher answers")),
    (errors.UnavailableError, _Kind(503, "unavailable", "A service is away")),
    (errors.UnknownFormatError, _Kind(409, "unknown-format", "Another release wrote this")),
    (errors.CorruptRecordError, _Kind(409, "damaged", "A record is damaged")),
    (errors.RecordError, _Kind(400, "unreadable", "The body cannot be read")),
    (errors.UnsafeStoreError, _Kind(503, "unsafe-store", "The store would lose data")),
    (errors.InvalidConfigError, _Kind(422, "invalid-config", "A setting has a wrong value")),
    (errors.InvalidTurnError, _Kind(422, "invalid-turn", "A field has a wrong value")),
    (errors.BatchingError, _Kind(422, "invalid", "A field has a wrong value")),
)
"""The first type that fits counts."""


class Reason(BaseModel):
    """Why a request has to wait."""

    kind: str = Field(examples=["out_of_capacity"])
    sentence: str = Field(examples=["8 groups are live, 8 are allowed after step 3"])
    facts: dict[str, str | int | float | None] = Field({}, description="Values of the sentence.")


class StoredFormat(BaseModel):
    """Stored state of another release."""

    record: str
    version: int
    supported: int = Field(description="The newest format that this release reads.")
    unknown: str = ""


class Problem(BaseModel):
    """An error, as RFC 9457 describes it."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None
    value: Any = None
    retry_after_s: float | None = None
    reasons: list[Reason] | None = None
    stored_format: StoredFormat | None = None


def problem_type(name: str) -> str:
    """Return the type of a document from the name of its error."""
    return TYPE_PREFIX + name


def named_reasons(listed: Iterable[errors.WaitReason]) -> list[Reason] | None:
    """Return reasons for waiting as parts of a document; None where there is none."""
    return [Reason(**each._asdict()) for each in listed] or None


def problem_of(error: Exception) -> Problem:
    """Return the document of an error. An error with `retry_after_s` is 429, not 409.

    >>> problem_of(errors.InvalidTurnError("logprobs", "3 values for 4 tokens")).field
    'logprobs'
    >>> problem_of(errors.ReleasedError("run 'a': step 3 is no longer retained")).status
    410
    """
    kind = next((each for type_, each in KINDS if isinstance(error, type_)), None)
    if kind is None:
        kind, detail = _Kind(500, "internal", "Internal error"), type(error).__name__
    else:
        detail = str(error)
    retry_after_s = getattr(error, "retry_after_s", None)
    reasons = error.reasons if isinstance(error, errors.UnavailableError) else ()
    is_format = isinstance(error, errors.UnknownFormatError)
    status = 429 if retry_after_s is not None and kind.status == 409 else kind.status
    return Problem(
        type=problem_type(kind.name),
        title=kind.title,
        status=status,
        detail=detail,
        field=getattr(error, "field", None),
        retry_after_s=retry_after_s,
        reasons=named_reasons(reasons),
        stored_format=StoredFormat(**vars(error)) if is_format else None,
    )


def invalid_request(error: RequestValidationError) -> Problem:
    """Return the document of a request that does not fit its declaration."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    value = first.get("input")
    if isinstance(value, list | dict | str | bytes) and len(text := quoted(value)) > _LONGEST_VALUE:
        value = text  # the value may be the whole body
    value = jsonable_encoder(value, custom_encoder={bytes: quoted})
    return Problem(
        type=problem_type("invalid-request"),
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
