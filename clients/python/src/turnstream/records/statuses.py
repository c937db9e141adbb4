"""Errors as gRPC statuses and back. One table, total in both directions.

Details of Turnstream (JSON with the class and its arguments) restore the exact error. A status
without them, from a proxy or a library, becomes an error with the same remedy.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, Final, cast

from turnstream import errors
from turnstream.errors import TurnstreamError

MAX_TEXT = 1_000
"""Characters of one text argument in the details: gRPC puts them in a header, limited to 8 KB."""

MAX_DETAILS = 6_000
"""Characters of the details, as far as shorter lists can achieve it."""

MAX_PARTS = 8
"""Parts of one argument that is a list or a mapping."""

MAX_NAME = 64


_STATUSES: Final[dict[type[TurnstreamError], str]] = {
    errors.TurnstreamError: "INTERNAL",
    errors.MissingExtraError: "INTERNAL",
    errors.BatchingError: "INVALID_ARGUMENT",
    errors.InvalidTurnError: "INVALID_ARGUMENT",
    errors.InvalidConfigError: "INVALID_ARGUMENT",
    errors.UnsafeStoreError: "INVALID_ARGUMENT",
    errors.RowTooLongError: "INVALID_ARGUMENT",
    errors.UnsupportedEstimatorError: "INVALID_ARGUMENT",
    errors.RecordError: "DATA_LOSS",
    errors.CorruptRecordError: "DATA_LOSS",
    errors.UnknownFormatError: "UNIMPLEMENTED",
    errors.UnavailableError: "UNAVAILABLE",
    errors.StoreUnavailableError: "UNAVAILABLE",
    errors.StoreFullError: "UNAVAILABLE",
    errors.NotReadyError: "DEADLINE_EXCEEDED",
    errors.BatcherUnavailableError: "UNAVAILABLE",
    errors.RejectedError: "RESOURCE_EXHAUSTED",
    errors.AccessDeniedError: "PERMISSION_DENIED",
    errors.UnknownKeyError: "UNAUTHENTICATED",
    errors.RunNotFoundError: "NOT_FOUND",
    errors.ConflictError: "ALREADY_EXISTS",
    errors.FencedError: "ABORTED",
    errors.TurnGapError: "FAILED_PRECONDITION",
    errors.StoreBehindError: "FAILED_PRECONDITION",
    errors.ObserverExpiredError: "FAILED_PRECONDITION",
    errors.ReleasedError: "OUT_OF_RANGE",
    errors.GroupTooLargeError: "FAILED_PRECONDITION",
    errors.PromptsExhaustedError: "OUT_OF_RANGE",
    errors.EndOfRunError: "OUT_OF_RANGE",
}

_ERRORS_OF_GRPC: Final[dict[str, type[TurnstreamError]]] = {  # others: TurnstreamError
    "CANCELLED": errors.UnavailableError,
    "INVALID_ARGUMENT": errors.BatchingError,
    "DEADLINE_EXCEEDED": errors.NotReadyError,
    "NOT_FOUND": errors.RunNotFoundError,
    "ALREADY_EXISTS": errors.ConflictError,
    "PERMISSION_DENIED": errors.AccessDeniedError,
    "RESOURCE_EXHAUSTED": errors.RejectedError,
    "FAILED_PRECONDITION": errors.RejectedError,
    "ABORTED": errors.FencedError,
    "OUT_OF_RANGE": errors.EndOfRunError,
    "UNIMPLEMENTED": errors.RejectedError,
    "UNAVAILABLE": errors.BatcherUnavailableError,
    "DATA_LOSS": errors.RecordError,
    "UNAUTHENTICATED": errors.UnknownKeyError,
}


def error_to_status(error: TurnstreamError) -> tuple[str, str]:
    """Return the gRPC status code, such as "NOT_FOUND", and details that restore the error."""
    return _STATUSES[_kind_of(error)], _details(error)


def status_to_error(code: str, details: str) -> TurnstreamError:
    """Return the error of a gRPC status, from its details or from the code alone."""
    restored = _restore(details)
    if restored is not None:
        return restored
    kind = _ERRORS_OF_GRPC.get(code, errors.TurnstreamError)
    return kind(f"{code}: {details}" if details else code)


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
