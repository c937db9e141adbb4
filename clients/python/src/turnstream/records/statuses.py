"""Errors as gRPC and HTTP statuses and back. One table, total in both directions.

Details of Turnstream (JSON with the class and its arguments) restore the exact error. A status
without them, from a proxy or a library, becomes an error with the same remedy.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, Final, NamedTuple, cast

from turnstream import errors
from turnstream.errors import TurnstreamError

MAX_TEXT = 1_000
"""Characters of one text argument in the details: gRPC puts them in a header, limited to 8 KB."""

MAX_DETAILS = 6_000
"""Characters of the details, as far as shorter lists can achieve it."""

MAX_PARTS = 8
"""Parts of one argument that is a list or a mapping."""

MAX_NAME = 64


class _Status(NamedTuple):
    grpc: str
    http: int


_STATUSES: Final[dict[type[TurnstreamError], _Status]] = {
    errors.TurnstreamError: _Status("INTERNAL", 500),
    errors.MissingExtraError: _Status("INTERNAL", 500),
    errors.BatchingError: _Status("INVALID_ARGUMENT", 422),
    errors.InvalidTurnError: _Status("INVALID_ARGUMENT", 422),
    errors.InvalidConfigError: _Status("INVALID_ARGUMENT", 422),
    errors.RowTooLongError: _Status("INVALID_ARGUMENT", 422),
    errors.UnmergeableColumnError: _Status("INVALID_ARGUMENT", 422),
    errors.UnsupportedEstimatorError: _Status("INVALID_ARGUMENT", 422),
    errors.RecordError: _Status("DATA_LOSS", 500),
    errors.CorruptRecordError: _Status("DATA_LOSS", 500),
    errors.UnknownFormatError: _Status("UNIMPLEMENTED", 501),
    errors.UnavailableError: _Status("UNAVAILABLE", 503),
    errors.StoreUnavailableError: _Status("UNAVAILABLE", 503),
    errors.StoreFullError: _Status("UNAVAILABLE", 507),
    errors.NotReadyError: _Status("DEADLINE_EXCEEDED", 504),
    errors.BatcherUnavailableError: _Status("UNAVAILABLE", 503),
    errors.RejectedError: _Status("RESOURCE_EXHAUSTED", 429),
    errors.RunNotFoundError: _Status("NOT_FOUND", 404),
    errors.ConflictError: _Status("ALREADY_EXISTS", 409),
    errors.FencedError: _Status("ABORTED", 412),
    errors.TurnGapError: _Status("FAILED_PRECONDITION", 409),
    errors.StoreBehindError: _Status("FAILED_PRECONDITION", 409),
    errors.ObserverExpiredError: _Status("FAILED_PRECONDITION", 410),
    errors.ReleasedError: _Status("OUT_OF_RANGE", 410),
    errors.GroupTooLargeError: _Status("FAILED_PRECONDITION", 413),
    errors.PromptsExhaustedError: _Status("OUT_OF_RANGE", 410),
    errors.EndOfRunError: _Status("OUT_OF_RANGE", 410),
}

_ERRORS_OF_GRPC: Final[dict[str, type[TurnstreamError]]] = {
    "OK": errors.TurnstreamError,
    "CANCELLED": errors.UnavailableError,
    "UNKNOWN": errors.TurnstreamError,
    "INVALID_ARGUMENT": errors.BatchingError,
    "DEADLINE_EXCEEDED": errors.NotReadyError,
    "NOT_FOUND": errors.RunNotFoundError,
    "ALREADY_EXISTS": errors.ConflictError,
    "PERMISSION_DENIED": errors.RejectedError,
    "RESOURCE_EXHAUSTED": errors.RejectedError,
    "FAILED_PRECONDITION": errors.RejectedError,
    "ABORTED": errors.FencedError,
    "OUT_OF_RANGE": errors.EndOfRunError,
    "UNIMPLEMENTED": errors.RejectedError,
    "INTERNAL": errors.TurnstreamError,
    "UNAVAILABLE": errors.BatcherUnavailableError,
    "DATA_LOSS": errors.RecordError,
    "UNAUTHENTICATED": errors.RejectedError,
}

_ERRORS_OF_HTTP: Final[dict[int, type[TurnstreamError]]] = {
    400: errors.BatchingError,
    404: errors.RunNotFoundError,
    408: errors.NotReadyError,
    409: errors.ConflictError,
    410: errors.EndOfRunError,
    412: errors.FencedError,
    422: errors.BatchingError,
    502: errors.UnavailableError,
    503: errors.UnavailableError,
    504: errors.NotReadyError,
    507: errors.StoreFullError,
}


def error_to_status(error: TurnstreamError) -> tuple[str, str]:
    """Return the gRPC status code, such as "NOT_FOUND", and details that restore the error."""
    return _STATUSES[_kind_of(error)].grpc, _details(error)


def status_to_error(code: str, details: str) -> TurnstreamError:
    """Return the error of a gRPC status, from its details or from the code alone."""
    restored = _restore(details)
    if restored is not None:
        return restored
    kind = _ERRORS_OF_GRPC.get(code, errors.TurnstreamError)
    return kind(_fallback_text(details, name=code))


def error_to_http_status(error: TurnstreamError) -> tuple[int, str]:
    """Return the HTTP status code, and the same details as for gRPC."""
    return _STATUSES[_kind_of(error)].http, _details(error)


def http_status_to_error(status: int, details: str) -> TurnstreamError:
    """Return the error of an HTTP status, from its details or from the number alone."""
    restored = _restore(details)
    if restored is not None:
        return restored
    kind = _ERRORS_OF_HTTP.get(status)
    if kind is None:
        kind = errors.RejectedError if 400 <= status < 500 else errors.TurnstreamError
    return kind(_fallback_text(details, name=f"HTTP {status}"))


def _kind_of(error: TurnstreamError) -> type[TurnstreamError]:
    """Return the error's class, or the nearest base with a status."""
    return next(kind for kind in type(error).__mro__ if kind in _STATUSES)


def _details(error: TurnstreamError) -> str:
    kind = _kind_of(error)
    arguments = [_short(argument) for argument in error.args]
    lists = [cast("list[Any]", part) for part in arguments if isinstance(part, list)]
    while len(text := _dumped(kind, arguments)) > MAX_DETAILS and any(lists):
        max(lists, key=len).pop()
    return text


def _dumped(kind: type[TurnstreamError], arguments: list[Any]) -> str:
    return json.dumps({"error": kind.__name__, "args": arguments}, default=_short)


def _short(argument: Any) -> object:
    if argument is None or isinstance(argument, bool | int | float):
        return argument
    if isinstance(argument, tuple):
        return [_short(part) for part in cast("tuple[Any, ...]", argument)[:MAX_PARTS]]
    if isinstance(argument, dict):
        parts = itertools.islice(cast("dict[Any, Any]", argument).items(), MAX_PARTS)
        return {str(name)[:MAX_NAME]: _short(part) for name, part in parts}
    text = str(argument)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _restore(details: str) -> TurnstreamError | None:
    """Return the error in the details; None for other text, or details of a newer release."""
    kinds = {kind.__name__: kind for kind in _STATUSES}
    try:
        content: Any = json.loads(details)
        return kinds[content["error"]](*content["args"])
    except (ValueError, TypeError, KeyError):
        return None


def _fallback_text(details: str, *, name: str) -> str:
    return f"{name}: {details}" if details else name
