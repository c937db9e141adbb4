"""Every error of Turnstream, by the remedy of the caller.

::

    TurnstreamError
    ├── BatchingError (ValueError)          bad input: correct it, do not retry
    │   ├── InvalidTurnError                a field of a turn is wrong: names field and value
    │   ├── InvalidConfigError              a run configuration that cannot work: names the field
    │   │   └── UnsafeStoreError            a store whose settings lose acknowledged writes
    │   ├── RowTooLongError                 a row is longer than the width or capacity asked for
    │   └── UnsupportedEstimatorError       an estimator that this data makes meaningless
    ├── RecordError (ValueError)            bytes not understood: dead-letter them
    │   ├── CorruptRecordError              checksum or length disagrees: the bytes are damaged
    │   └── UnknownFormatError              written by a newer or an older release
    ├── UnavailableError (ConnectionError)  not now: see retry_after_s; says why in `reasons`
    │   ├── StoreUnavailableError           Redis is away or restarting
    │   ├── StoreFullError                  Redis has no memory left: says what holds it
    │   ├── NotReadyError                   the deadline passed before the data came: says why
    │   └── BatcherUnavailableError         no batcher answered
    ├── MissingExtraError (ImportError)     a package is not installed: has the pip command
    └── RejectedError                       asked wrongly, too late or too fast; see retry_after_s
        ├── AccessDeniedError               the key of the request does not allow it
        │   └── UnknownKeyError             no key, or one that is unknown, revoked or expired
        ├── RunNotFoundError                no run of that name
        ├── ConflictError                   the same key came with another content
        ├── FencedError                     a newer owner has taken over: stop
        ├── TurnGapError                    a turn arrived before the one it follows
        ├── StoreBehindError                the store does not know what the token claims
        ├── ObserverExpiredError            an observer was silent for too long: declare it anew
        ├── ReleasedError                   a step or a version that is no longer retained: names it
        ├── GroupTooLargeError              a group or trajectory above its limit
        ├── PromptsExhaustedError           every prompt of the run is done, and no other was added
        └── EndOfRunError                   the run is closed and everything in it was delivered

Constructor arguments equal `args`, so that every error survives pickling to another process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple


class TurnstreamError(Exception):
    """Base of all errors below.

    Attributes:
        others: further errors of the same call.
    """

    others: tuple[TurnstreamError, ...] = ()


class BatchingError(TurnstreamError, ValueError):
    """Input that cannot be turned into training rows. Retrying gives the same."""


class _NamesField(Exception):
    """Part of an error that names a field of the input."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class InvalidTurnError(_NamesField, BatchingError):
    """A field of a turn has a wrong length, type or value."""


class InvalidConfigError(_NamesField, BatchingError):
    """A setting, or a combination of settings, that cannot work."""


class UnsafeStoreError(InvalidConfigError):
    """A store that would lose acknowledged writes, or is too old. `field` names its setting."""


class RowTooLongError(BatchingError):
    """A row does not fit. Rows are never truncated here: the caller decides."""

    def __init__(self, row: int, length: int, limit: int) -> None:
        super().__init__(row, length, limit)
        self.row = row
        self.length = length
        self.limit = limit

    def __str__(self) -> str:
        return f"row {self.row} has {self.length} tokens, more than {self.limit}"


class UnsupportedEstimatorError(BatchingError):
    """An advantage estimator that is meaningless, or undefined, for the data it was given."""


class RecordError(TurnstreamError, ValueError):
    """Bytes that are not a record of ours."""


class CorruptRecordError(RecordError):
    """A checksum or a length inside a record disagrees with its bytes."""


class UnknownFormatError(RecordError):
    """Stored state that another release of Turnstream wrote, and this one cannot read.

    Attributes:
        record: name of the stored state.
        version: its format.
        supported: the newest format that this release reads.
        unknown: the unknown part of a record of a known format.
    """

    def __init__(self, record: str, version: int, supported: int, unknown: str = "") -> None:
        super().__init__(record, version, supported, unknown)
        self.record = record
        self.version = version
        self.supported = supported
        self.unknown = unknown

    def __str__(self) -> str:
        if self.version < self.supported:
            return (
                f"{self.record} was written by an older release of Turnstream (format "
                f"{self.version}; this one reads format {self.supported}): finish the run with "
                f"that release, or remove it with `turnstream run delete`"
            )
        part = f", with {self.unknown}" if self.unknown else ""
        return (
            f"{self.record} was written by a newer release of Turnstream{part} (format "
            f"{self.version}; this one reads up to {self.supported})"
        )


class WaitKind(StrEnum):
    """Reasons for a wait, one for each remedy: see docs/waits.md."""

    NO_ADMISSION = "no_admission"
    NOT_READY = "not_ready"
    NOT_ACKNOWLEDGED = "not_acknowledged"
    STORE_AWAY = "store_away"
    STORE_FULL = "store_full"
    BATCHER_AWAY = "batcher_away"
    RUN_CLOSED = "run_closed"
    RUN_PAUSED = "run_paused"
    PAYLOAD_DAMAGED = "payload_damaged"
    PLANNING_FAILS = "planning_fails"
    TRAINER_NOT_STEPPED = "trainer_not_stepped"
    TOO_FEW_READY = "too_few_ready"
    GENERATOR_GONE = "generator_gone"
    NO_SIGNAL = "no_signal"
    MEMBER_OPEN = "member_open"
    OUT_OF_CAPACITY = "out_of_capacity"
    RELEASE_FAILS = "release_fails"
    OUT_OF_BYTES = "out_of_bytes"
    NOTHING_WRONG = "nothing_wrong"


class WaitReason(NamedTuple):
    """A reason why a wait timed out.

    Attributes:
        kind: a WaitKind; another release may send others.
        sentence: for people.
        facts: values in the sentence, by name: group, sample, writer, number of seconds.
    """

    kind: str
    sentence: str
    facts: Mapping[str, str | int | float | None]


class UnavailableError(TurnstreamError, ConnectionError):
    """Something is away for now. The same call may succeed later.

    Attributes:
        message: for people.
        reasons: the awaited thing and the causes of the delay, the most important first; empty if
            no cause is known.
        retry_after_s: seconds until the next call, for a store that is full, away or loading.
    """

    def __init__(
        self,
        message: str = "",
        reasons: Iterable[Sequence[Any]] = (),
        retry_after_s: float | None = None,
    ) -> None:
        self.message = message
        self.reasons = tuple(WaitReason(*reason) for reason in reasons)
        self.retry_after_s = retry_after_s
        super().__init__(message, self.reasons)
        self.args = (message, self.reasons, retry_after_s)  # an OSError would drop the third

    def __str__(self) -> str:
        return self.message


class StoreUnavailableError(UnavailableError):
    """Redis cannot be reached, does not answer, or is loading."""


class StoreFullError(UnavailableError):
    """Redis has reached its `maxmemory`, and takes no writes but those that make room."""


class NotReadyError(UnavailableError):
    """The deadline of a wait passed. The message says what was waited for."""


class BatcherUnavailableError(UnavailableError):
    """No batcher answered the call."""


class RejectedError(TurnstreamError):
    """A call that was understood and refused.

    Attributes:
        retry_after_s: seconds after which the same call may be accepted; None where it never is.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class MissingExtraError(TurnstreamError, ImportError):
    """A package of an optional extra is not installed.

    Attributes:
        needed_by: the call or module that needs it.
        package: the missing package.
        extra: the extra that has it.
        distribution: "turnstream" or "turnstream-server", which has the extra.
    """

    def __init__(
        self, needed_by: str, package: str, extra: str, distribution: str = "turnstream"
    ) -> None:
        super().__init__(needed_by, package, extra, distribution)
        self.needed_by = needed_by
        self.package = package
        self.extra = extra
        self.distribution = distribution

    def __str__(self) -> str:
        folder = "./clients/python" if self.distribution == "turnstream" else "."
        return (
            f"{self.needed_by} needs the package {self.package}: "
            f"pip install '{self.distribution}[{self.extra}]' (in the repository: "
            f"pip install '{folder}[{self.extra}]')"
        )


class AccessDeniedError(RejectedError):
    """The key of the request does not have the role, or may not use the run."""


class UnknownKeyError(AccessDeniedError):
    """The request has no key, or its key is unknown, revoked or expired."""


class RunNotFoundError(RejectedError):
    """The store has no run of that name."""


class ConflictError(RejectedError):
    """The key has another content already, which is unchanged."""


class FencedError(RejectedError):
    """The caller's epoch has ended: another writer, planner or trainer session replaced it."""


class TurnGapError(RejectedError):
    """A turn that does not follow the last stored one. The message names the expected number."""


class StoreBehindError(RejectedError):
    """A recovery token names a batch that this store does not have: it is an older copy."""


class ObserverExpiredError(RejectedError):
    """An observer was silent for longer than its expiry, and nothing is kept for it any more."""


class ReleasedError(RejectedError):
    """A step or a version of weights is no longer retained. Names it, and the oldest kept step."""


class GroupTooLargeError(RejectedError):
    """A group or trajectory has more samples or bytes than is allowed. Names what to change."""


class PromptsExhaustedError(RejectedError):
    """Every prompt of the run is done: others may be added, or the run closed."""


class EndOfRunError(RejectedError):
    """The run was closed and its last batch has been delivered and stepped."""
