"""Problem documents of a gateway (RFC 9457), and the version of requests to it.

A document describes a whole answer, or one item of a result. `error_of` takes both. There is one
table from the types of documents to our errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, cast

from turnstream import errors

MEDIA_TYPE: Final = "application/problem+json"

HEADER: Final = "Turnstream-Wire"
"""Header of each request of the SDK, with the version of the request.

The answer has the highest version that the gateway knows in the same header. A request without the
header is accepted: other programs need none.
"""

WIRE_VERSION: Final = 1
"""The version of this release. A change that an older gateway or SDK would misread raises it."""

WIRE_PROBLEM: Final = "wire-version"
"""Type of the problem document of a version that the gateway does not know."""

TYPE_PREFIX: Final = "https://turnstream.dev/problems/"
"""First characters of the type of a document; the name of the error follows."""

ERRORS: Final[Mapping[str, type[errors.TurnstreamError]]] = MappingProxyType(
    {
        "unknown-key": errors.UnknownKeyError,
        "access-denied": errors.AccessDeniedError,
        "not-found": errors.RunNotFoundError,
        "trajectory-not-found": errors.RejectedError,
        "released": errors.ReleasedError,
        "end-of-run": errors.EndOfRunError,
        "prompts-exhausted": errors.PromptsExhaustedError,
        "group-too-large": errors.GroupTooLargeError,
        "conflict": errors.ConflictError,
        "fenced": errors.FencedError,
        "turn-gap": errors.TurnGapError,
        "store-behind": errors.StoreBehindError,
        "observer-expired": errors.ObserverExpiredError,
        "rejected": errors.RejectedError,
        WIRE_PROBLEM: errors.RejectedError,
        "store-full": errors.StoreFullError,
        "not-ready": errors.NotReadyError,
        "batcher-unavailable": errors.BatcherUnavailableError,
        "unavailable": errors.StoreUnavailableError,
        "store-restarted": errors.StoreUnavailableError,
        "internal": errors.StoreUnavailableError,
        "unknown-format": errors.UnknownFormatError,
        "damaged": errors.CorruptRecordError,
        "unreadable": errors.RecordError,
        "unsafe-store": errors.UnsafeStoreError,
        "invalid-config": errors.InvalidConfigError,
        "invalid-request": errors.InvalidConfigError,
        "invalid-turn": errors.InvalidTurnError,
        "invalid": errors.BatchingError,
    }
)
"""The error of each type. A gateway that failed is away: the same call may succeed later."""

_STATUSES: Final[Mapping[int, type[errors.RejectedError]]] = MappingProxyType(
    {401: errors.UnknownKeyError, 403: errors.AccessDeniedError}
)
"""The errors of documents with a type that this release does not know."""


def problem_name(problem: Mapping[str, Any]) -> str:
    """Return the name of the error of a document; "" for a document without a type of ours.

    >>> problem_name({"type": "https://turnstream.dev/problems/turn-gap"})
    'turn-gap'
    """
    kind = str(problem.get("type", ""))
    return kind.removeprefix(TYPE_PREFIX) if kind.startswith(TYPE_PREFIX) else ""


def error_of(problem: Mapping[str, Any]) -> errors.TurnstreamError:
    """Return the error of a problem document, with the detail of the server as its message.

    >>> error_of({"type": TYPE_PREFIX + "turn-gap", "status": 409, "detail": "expected turn 3"})
    TurnGapError('expected turn 3', None)
    >>> error_of({"type": TYPE_PREFIX + "of-a-later-release", "status": 503, "detail": "away"})
    StoreUnavailableError('away', (), None)
    """
    status = int(problem.get("status") or 0)
    detail = str(problem.get("detail") or problem.get("title") or f"HTTP {status}")
    kind = ERRORS.get(problem_name(problem))
    if kind is None:
        kind = _STATUSES.get(status, errors.RejectedError)
        kind = errors.StoreUnavailableError if status >= 500 else kind
    if issubclass(kind, errors.UnknownFormatError):
        found = _format_error(problem)
        return errors.RejectedError(detail) if found is None else found
    if issubclass(kind, errors.InvalidTurnError | errors.InvalidConfigError):
        field = str(problem.get("field") or "the request")
        return kind(field, detail.removeprefix(f"{field}: "))
    retry_after_s = _seconds(problem.get("retry_after_s"))
    if issubclass(kind, errors.UnavailableError):
        return kind(detail, reasons_of(problem.get("reasons")), retry_after_s)
    if issubclass(kind, errors.RejectedError):
        return kind(detail, retry_after_s)
    return kind(detail)


def reasons_of(listed: object) -> list[errors.WaitReason]:
    """Return the reasons for waiting of a document or an answer; none for other values.

    >>> reasons_of([{"kind": "no_version", "sentence": "none was announced"}])
    [WaitReason(kind='no_version', sentence='none was announced', facts={})]
    """
    if not isinstance(listed, list):
        return []
    found = [each for each in cast("list[Any]", listed) if isinstance(each, dict)]
    return [
        errors.WaitReason(
            str(each.get("kind", "")), str(each.get("sentence", "")), dict(each.get("facts") or {})
        )
        for each in cast("Sequence[dict[str, Any]]", found)
    ]


def _format_error(problem: Mapping[str, Any]) -> errors.UnknownFormatError | None:
    """Return the error of stored state of another release; None for a document without facts."""
    stored = problem.get("stored_format")
    if not isinstance(stored, dict):
        return None
    facts = cast("dict[str, Any]", stored)
    return errors.UnknownFormatError(
        str(facts.get("record", "")),
        int(facts.get("version", 0)),
        int(facts.get("supported", 0)),
        str(facts.get("unknown", "")),
    )


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
