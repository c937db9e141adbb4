"""Errors of the store: the one table from error replies to the errors of this package.

A script refuses with `CODE message`, or with `CODE [fact] message` where a caller acts on a fact.
The code and the fact are for programs. The message is for people: no program reads it.

================  ====================  ==================  ========================================
code              error                 fact                meaning
================  ====================  ==================  ========================================
FENCED            FencedError           state, or released  another owner has it, or finished.
CONFLICT          ConflictError         state, group, name  other content, or finished.
INVALID           InvalidTurnError      attempt             an attempt that is not allowed.
INVALID           RejectedError                             another argument that is not allowed.
GAP               TurnGapError          expected turn       an earlier turn is missing.
WAIT              RejectedError         wake id             no capacity now.
FORMAT            UnknownFormatError    format of the run   another release wrote the run.
HELD              ConflictError         ms of the lease     another writer holds the lease.
NORUN             RunNotFoundError                          no run of that name.
BEHIND            StoreBehindError                          an unknown recovery token.
EXPIRED           ObserverExpiredError                      an observer was silent for too long.
CLOSED            EndOfRunError                             the run takes no new group.
RELEASED          ReleasedError                             a step that is no longer retained.
TOOLARGE          GroupTooLargeError                        a group or trajectory above its limit.
DAMAGED           CorruptRecordError                        a damaged counter; nothing was written.
NOPERM            AccessDeniedError                         user or API key may not do this.
================  ====================  ==================  ========================================

The state is that of a trajectory in the ledger, or `unknown` where the ledger does not have it.
`group` stands for a group that takes no member any more, and `name` for a group that is finished.

NOPERM is a code of the server, and of a gateway; no script has it.

A server that has reached its `maxmemory` is StoreFullError. Everything else that passes by itself
(no connection, a server that is loading, read-only or without its disk) is StoreUnavailableError.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from redis import exceptions as redis_errors

from turnstream.errors import (
    AccessDeniedError,
    ConflictError,
    CorruptRecordError,
    EndOfRunError,
    FencedError,
    GroupTooLargeError,
    InvalidTurnError,
    ObserverExpiredError,
    RejectedError,
    ReleasedError,
    RunNotFoundError,
    StoreBehindError,
    StoreFullError,
    StoreUnavailableError,
    TurnGapError,
    TurnstreamError,
    UnknownFormatError,
)
from turnstream.records.configs import RUN_FORMAT
from turnstream.store.client.deadlines import is_silence
from turnstream.store.client.trajectory_names import with_readable_names

RETRY_AFTER_S = 1.0
"""Pause for a caller that cannot read the `wake` stream, or whose store is full or away."""

DENIED: Final = "NOPERM"
"""The code of the error reply to a command that the user, or the API key, may not call."""

FULL = "OOM"
"""The code of the error reply of a server at its `maxmemory`."""

_REFUSALS: dict[str, type[RejectedError]] = {
    "FENCED": FencedError,
    "CONFLICT": ConflictError,
    "GAP": TurnGapError,
    "NORUN": RunNotFoundError,
    "BEHIND": StoreBehindError,
    "EXPIRED": ObserverExpiredError,
    "CLOSED": EndOfRunError,
    "RELEASED": ReleasedError,
    "TOOLARGE": GroupTooLargeError,
}
CODES: Final = frozenset({*_REFUSALS, "INVALID", "WAIT", "HELD", "DAMAGED", "FORMAT"})
"""The codes of scripts."""

FACTS: Final = frozenset({"unknown", "released", "group", "name", "attempt"})
"""The facts that are words of their own; the others are numbers, ids or states of the ledger."""

_PASSING = frozenset(
    {
        *(FULL, "LOADING", "BUSY", "MISCONF", "READONLY", "NOREPLICAS", "NOSCRIPT"),
        *("MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "EXECABORT"),
    }
)
_CODES: dict[type[redis_errors.ResponseError], str] = {  # older clients do not keep it
    redis_errors.ClusterDownError: "CLUSTERDOWN",
    redis_errors.ExecAbortError: "EXECABORT",
    redis_errors.MasterDownError: "MASTERDOWN",
    redis_errors.NoPermissionError: DENIED,
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


class RefusedRequestError(redis_errors.RedisError):
    """A request that a gateway refused as a whole, for good.

    Attributes:
        error: error for the caller.
    """

    def __init__(self, error: TurnstreamError) -> None:
        super().__init__(error)
        self.error = error


_REPLY: Final = re.compile(r"(?P<code>\S+) ?(?:\[(?P<fact>[^\]]*)\] ?)?(?P<message>.*)", re.DOTALL)


class Refusal(NamedTuple):
    """An error reply in parts, see the table above; `fact` is empty if the reply has none."""

    code: str
    fact: str
    message: str

    @property
    def is_passing(self) -> bool:
        """Whether it is about the state of the server and not about the command."""
        return self.code in _PASSING

    @property
    def error(self) -> TurnstreamError:
        """Error of the reply, with readable names in its message."""
        message = with_readable_names(self.message)
        if self.code == "WAIT":
            return RejectedError(message, RETRY_AFTER_S)
        if self.code == "HELD":
            return ConflictError(message, int(self.fact) / 1000)
        if self.code == "FORMAT":
            return UnknownFormatError("the run", int(self.fact), RUN_FORMAT)
        if self.code == FULL:
            return StoreFullError(f"the store is full: {message}", retry_after_s=RETRY_AFTER_S)
        if self.code == DENIED:
            return _denied(message)
        if self.code == "INVALID" and self.fact:
            return InvalidTurnError(self.fact, message)
        if self.code == "DAMAGED":
            return CorruptRecordError(f"damaged: {message}")
        if self.is_passing:
            return StoreUnavailableError(f"{self.code} {message}", retry_after_s=RETRY_AFTER_S)
        if self.code in _REFUSALS:
            return _REFUSALS[self.code](message)
        return RejectedError(f"the store refused the command: {self.code} {message}")


def parse_refusal(text: str) -> Refusal:
    """Return the parts of an error reply.

    >>> parse_refusal("GAP [3] expected 3")
    Refusal(code='GAP', fact='3', message='expected 3')
    >>> parse_refusal("NORUN no such run").error
    RunNotFoundError('no such run', None)
    """
    found = _REPLY.fullmatch(text)
    if found is None:
        return Refusal("", "", text)
    return Refusal(found["code"], found["fact"] or "", found["message"])


def translate(error: Exception) -> TurnstreamError:
    """Return our error for an error of the Redis client, or of its socket."""
    if isinstance(error, TurnstreamError):
        return error
    if isinstance(error, RefusedRequestError):
        return error.error
    if isinstance(error, _DENIED):
        return _denied(str(error))
    if isinstance(error, redis_errors.ResponseError):
        return parse_refusal(error_text(error)).error
    if is_silence(error):
        message = f"the store has not answered in time: {error}".rstrip(": ")
    else:
        message = f"the store cannot be reached: {error}"
    return StoreUnavailableError(message, retry_after_s=RETRY_AFTER_S)


def _denied(message: str) -> AccessDeniedError:
    return AccessDeniedError(f"the store denied access: {message}")


@contextlib.contextmanager
def translating() -> Iterator[None]:
    """Raise errors of the Redis client inside the block as our errors."""
    try:
        yield
    except TurnstreamError:
        raise
    except (redis_errors.RedisError, OSError) as error:
        raise translate(error) from error


def error_text(error: redis_errors.ResponseError) -> str:
    """Return the error reply as the server sent it: the client cuts off the codes that it knows."""
    text = str(error)
    code = getattr(error, "status_code", None) or _CODES.get(type(error), "")
    return text if not code or text.startswith(f"{code} ") else f"{code} {text}"
