"""What an error of the store means: the one table from Redis errors to ours.

The scripts refuse with an error reply whose first word is a code; the rest is for people.

=========  ==========================  ===================================================
FENCED     FencedError                 a newer owner has taken over
CONFLICT   ConflictError               the key is taken by another content
INVALID    RejectedError               an argument that cannot be
GAP        TurnGapError                `GAP expected <k>`: turn k is missing before this one
WAIT       RejectedError               `WAIT <wake id> <why>`: see `wake_id`
HELD       ConflictError               `HELD <ms> <why>`: a lease that ends after so long
NORUN      RunNotFoundError            no run of that name
BEHIND     StoreBehindError            a recovery token that this store does not have
EXPIRED    ObserverExpiredError        an observer was silent for too long
CLOSED     EndOfRunError               the run takes no new group
RELEASED   ReleasedError               a step that is no longer retained
UNHEARD    NotReadyError               a step that a rank is not known to have yet
TOOLARGE   GroupTooLargeError          a group with too many samples, or too large for any room
DAMAGED    CorruptRecordError          a counter that is no whole number; nothing was written
=========  ==========================  ===================================================

A server that has reached its `maxmemory` is StoreFullError. Everything else that passes by itself
(no connection, a server that is loading, read-only or without its disk) is StoreUnavailableError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from redis import exceptions as redis_errors

from turnstream.errors import (
    ConflictError,
    CorruptRecordError,
    EndOfRunError,
    FencedError,
    GroupTooLargeError,
    NotReadyError,
    ObserverExpiredError,
    RejectedError,
    ReleasedError,
    RunNotFoundError,
    StoreBehindError,
    StoreFullError,
    StoreUnavailableError,
    TurnGapError,
    TurnstreamError,
)
from turnstream.store.limits import is_silence
from turnstream.store.trajectory_names import with_readable_names

RETRY_AFTER_S = 1.0
"""Said to a caller that was told to wait and cannot listen to the run's `wake` stream, or whose
store is full or away."""

FULL = "OOM"
"""First word of an error reply of a server that has reached its `maxmemory`."""

_REFUSALS: dict[str, type[RejectedError | NotReadyError]] = {
    "FENCED": FencedError,
    "CONFLICT": ConflictError,
    "GAP": TurnGapError,
    "NORUN": RunNotFoundError,
    "BEHIND": StoreBehindError,
    "EXPIRED": ObserverExpiredError,
    "CLOSED": EndOfRunError,
    "RELEASED": ReleasedError,
    "UNHEARD": NotReadyError,
    "TOOLARGE": GroupTooLargeError,
}
_PASSING = frozenset(
    {
        *(FULL, "LOADING", "BUSY", "MISCONF", "READONLY", "NOREPLICAS", "NOSCRIPT"),
        *("MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "EXECABORT"),
    }
)
_CODES: dict[type[redis_errors.ResponseError], str] = {  # what older clients do not keep
    redis_errors.ClusterDownError: "CLUSTERDOWN",
    redis_errors.ExecAbortError: "EXECABORT",
    redis_errors.MasterDownError: "MASTERDOWN",
    redis_errors.NoScriptError: "NOSCRIPT",
    redis_errors.OutOfMemoryError: FULL,
    redis_errors.ReadOnlyError: "READONLY",
    redis_errors.TryAgainError: "TRYAGAIN",
}
_DENIED = (
    redis_errors.AuthenticationError,
    redis_errors.AuthorizationError,
    redis_errors.NoPermissionError,
)


def refusal(text: str) -> TurnstreamError:
    """The error that a script's `CODE message` stands for, its names as people read them.

    >>> refusal("GAP expected 3")
    TurnGapError('expected 3', None)
    """
    code, _, message = with_readable_names(text).partition(" ")
    if code == "WAIT":
        _, _, reason = message.partition(" ")
        return RejectedError(reason, RETRY_AFTER_S)
    if code == "HELD":
        left_ms, _, reason = message.partition(" ")
        return ConflictError(reason, int(left_ms) / 1000)
    if code == FULL:
        return StoreFullError(f"the store is full: {message}", retry_after_s=RETRY_AFTER_S)
    if code == "DAMAGED":
        return CorruptRecordError(f"damaged: {message}")
    if code in _PASSING:
        return StoreUnavailableError(text, retry_after_s=RETRY_AFTER_S)
    if code in _REFUSALS:
        return _REFUSALS[code](message)
    return RejectedError(f"the store refused the command: {text}")


def translate(error: Exception) -> TurnstreamError:
    """The error of ours that an error of the Redis client, or of its socket, stands for."""
    if isinstance(error, TurnstreamError):
        return error
    if isinstance(error, _DENIED):
        return RejectedError(f"the store denied access: {error}")
    if isinstance(error, redis_errors.ResponseError):
        return refusal(error_text(error))
    if is_silence(error):
        message = f"the store has not answered in time: {error}".rstrip(": ")
    else:
        message = f"the store cannot be reached: {error}"
    return StoreUnavailableError(message, retry_after_s=RETRY_AFTER_S)


@contextlib.contextmanager
def translating() -> Iterator[None]:
    """Inside, what the Redis client raises is raised as an error of ours."""
    try:
        yield
    except TurnstreamError:
        raise
    except (redis_errors.RedisError, OSError) as error:
        raise translate(error) from error


def error_text(error: redis_errors.ResponseError) -> str:
    """The error reply as the server sent it: the client cuts off the codes that it knows."""
    text = str(error)
    code = getattr(error, "status_code", None) or _CODES.get(type(error), "")
    return text if not code or text.startswith(f"{code} ") else f"{code} {text}"


def wake_id(text: str) -> str | None:
    """The last id of the run's wake stream at the moment of a WAIT refusal; None of any other.

    A read of the stream from that id returns as soon as the same call may succeed.

    >>> wake_id("WAIT 17-0 20 groups are live")
    '17-0'
    """
    code, _, message = text.partition(" ")
    return message.partition(" ")[0] if code == "WAIT" else None


def is_passing(text: str) -> bool:
    """Whether an error reply is about the state of the server and not about the command."""
    return text.partition(" ")[0] in _PASSING
