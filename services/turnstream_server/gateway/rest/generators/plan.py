"""The calls of one body, checked: which are sent, and how their replies become the answer.

A script trusts its arguments, and a planner trusts what scripts have stored. So each record is
decoded, and the role of the key is checked for each request. The SDK makes the same checks before
it encodes a record. A program without the SDK may not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, get_args

import numpy as np
from redis.exceptions import ResponseError

from turnstream.batching.config.values import LARGEST_GROUP
from turnstream.errors import AccessDeniedError, InvalidTurnError, RecordError, TurnstreamError
from turnstream.generator.encode.checks import MAX_LOGPROB, MAX_RECORD_BYTES
from turnstream.generator.encode.group_checks import (
    checked_key,
    checked_metrics,
    checked_name,
    checked_opening,
    checked_reward,
    checked_tags,
    require_turns,
)
from turnstream.generator.outbox.writes import MAX_ROUND_BYTES, MAX_ROUND_TURNS
from turnstream.generator.requests import (
    AppendTurns,
    AwaitWake,
    CloseRun,
    NextTask,
    OpenGroup,
    PostReward,
    PostSeals,
    ReadConfig,
    ReadGroup,
    ReadTurns,
    ReadWaits,
    Request,
    ScriptRequest,
)
from turnstream.generator.transport.messages import request_of
from turnstream.records.encoding import UNREADABLE, parse_message
from turnstream.records.events import MAX_EVENT_BYTES, MAX_TURNS, decode_event
from turnstream.records.turns import decode_turn
from turnstream.store.client.keys import parse_trajectory_id
from turnstream.store.client.replies import DENIED
from turnstream.store.run.groups import ATTEMPT_LIMIT, MAX_HEARTBEATS
from turnstream.store.run.tasks import MOST_PASSED
from turnstream.types import (
    Leftover,
    RewardPosted,
    SealedTrajectory,
    StoredTurn,
    TrajectoryKey,
    VersionRun,
)
from turnstream.types.names import (
    RunId,
    checked_run_name,
    checked_text,
    named_numbers,
    quoted,
    whole_number,
)
from turnstream.wire.v1 import calls_pb2 as wire
from turnstream_server.gateway.stream_waits import EntryId
from turnstream_server.gateway.tinker.message_fields import check_fields
from turnstream_server.keys.records import ApiKey, Role

_Event = TypeVar("_Event")

_NUMBER_LIMIT: Final = 2**53
"""Scripts count in floats of 64 bits."""

_MOST_NAMED: Final = MAX_HEARTBEATS
"""Trajectories of one call, which blocks the store."""

ANY_ROLE: Final[tuple[Role, ...]] = ("read", "produce", "train")
_ROLES: Final[Mapping[type, tuple[Role, ...]]] = {
    CloseRun: ("admin",),
    ReadConfig: ANY_ROLE,
    ReadWaits: ANY_ROLE,
    AwaitWake: ANY_ROLE,
}
"""Roles of which a request needs one; others need `produce`."""


def check_request(request: Request, key: ApiKey) -> None:
    """Check that a key may make a request, and that a script can take it.

    Raises:
        AccessDeniedError: the key has not the role, or may not use the run.
        RecordError, BatchingError: an argument or a record has a wrong value.
    """
    key.require(*_ROLES.get(type(request), ("produce",)), run=request.run)
    _check_arguments(request._asdict())
    check = _CHECKS.get(type(request))
    if check is not None:
        check(request)


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments that mean the same in all requests, and in the parts of their lists."""
    for name, value in arguments.items():
        match name:
            case "writer" if not value:
                raise RecordError("the body has no writer, which a call needs")
            case "trajectory_id":
                _trajectory(value)
            case "epoch" | "num_bytes" | "prompt_number":
                whole_number(value or 0, field=name, limit=_NUMBER_LIMIT)
            case "reason":
                checked_text(value, field=name)
            case "leases" | "reservations" | "seals":
                if len(value) > _MOST_NAMED:
                    raise RecordError(
                        f"a call names {len(value)} trajectories, at most {_MOST_NAMED}"
                    )
                for each in value:
                    _check_arguments(each._asdict())
            case _:
                pass


def _check_opening(request: OpenGroup) -> None:
    group = request.group
    checked_opening(
        group.group_id,
        group.num_samples,
        group.prompt_uid,
        num_needed=group.num_needed,
        purpose=group.purpose,
    )
    if len(request.trajectory_ids) > LARGEST_GROUP:
        num = len(request.trajectory_ids)
        raise RecordError(f"a call opens {num} trajectories, at most {LARGEST_GROUP}")
    for name in request.trajectory_ids:
        checked_key(parse_trajectory_id(name), num_samples=group.num_samples)


def _check_turns(request: AppendTurns) -> None:
    turns = [*request.records]
    if request.is_sealed:
        _checked_seal(turns.pop(), key=_trajectory(request.trajectory_id))
    _check_size(turns, most=MAX_ROUND_TURNS)
    for index, record in enumerate(turns, start=request.first):
        _check_turn(record, index=index)


def _check_seals(request: PostSeals) -> None:
    _check_size([each.record for each in request.seals], most=_MOST_NAMED)
    for each in request.seals:
        seal = _checked_seal(each.record, key=_trajectory(each.trajectory_id))
        if each.awaits_reward != seal.awaits_reward:
            raise RecordError(f"awaits_reward of {each.trajectory_id} differs from its seal")


def _check_reward(request: PostReward) -> None:
    posted = event_of(request.record, RewardPosted)
    _check_key(posted.key, expected=_trajectory(request.trajectory_id))
    components: Mapping[str, float] = posted.reward_components
    named_numbers(components, field="reward_components")
    if checked_reward(posted.reward) is None and not components:
        raise InvalidTurnError("reward", "there is none, and no component")


def _check_closing(request: CloseRun) -> None:
    if request.leftover not in (None, *get_args(Leftover)):
        raise InvalidTurnError("leftover", f"{quoted(request.leftover)} is unknown")


def _check_group(request: ReadGroup) -> None:
    checked_name(request.group_id, field="group_id")
    whole_number(request.num_samples, field="num_samples", limit=LARGEST_GROUP + 1)


def _check_task(request: NextTask) -> None:
    whole_number(request.num_passed, field="num_passed", limit=MOST_PASSED + 1)


def _check_wake(request: AwaitWake) -> None:
    try:
        EntryId.parse(request.wake_id)
    except ValueError as error:
        raise InvalidTurnError("wake_id", f"{quoted(request.wake_id)} is no position") from error


_CHECKS: Final[dict[type, Callable[[Any], None]]] = {
    OpenGroup: _check_opening,
    AppendTurns: _check_turns,
    PostSeals: _check_seals,
    PostReward: _check_reward,
    CloseRun: _check_closing,
    ReadGroup: _check_group,
    NextTask: _check_task,
    AwaitWake: _check_wake,
}
"""Checks of requests that have further arguments or records."""


def _trajectory(name: str) -> TrajectoryKey:
    return checked_key(parse_trajectory_id(name))


def _check_size(records: Sequence[bytes], *, most: int) -> None:
    """Check the records of one call, which stops the store: the SDK sends one alone if it is large.

    >>> _check_size([bytes(4 << 20)], most=2)
    >>> _check_size([bytes(1 << 20), b"x"], most=2)
    Traceback (most recent call last):
    turnstream.errors.RecordError: 2 records of one call have 1048577 bytes, at most 2 of 1048576
    """
    num_bytes = sum(map(len, records))
    if len(records) > most or (len(records) > 1 and num_bytes > MAX_ROUND_BYTES):
        raise RecordError(
            f"{len(records)} records of one call have {num_bytes} bytes, at most {most} of "
            f"{MAX_ROUND_BYTES}"
        )


def _check_turn(record: bytes, *, index: int) -> None:
    if len(record) > MAX_RECORD_BYTES:
        raise RecordError(f"turn {index} has {len(record)} bytes, more than {MAX_RECORD_BYTES}")
    turn = decode_turn(record)
    if turn.index != index or index >= MAX_TURNS:
        raise RecordError(f"turn {turn.index} stands at {index}, of at most {MAX_TURNS} turns")
    _check_values(turn)


def _checked_seal(record: bytes, *, key: TrajectoryKey) -> SealedTrajectory:
    """Return the seal of this trajectory from its record."""
    seal = event_of(record, SealedTrajectory)
    _check_key(seal.key, expected=key)
    require_turns(len(seal.turns), seal.status)
    checked_reward(seal.reward, awaits_reward=seal.awaits_reward)
    checked_metrics(seal.metrics)
    checked_tags(seal.tags)
    named_numbers(seal.reward_components, field="reward_components")
    named_numbers(seal.sampling, field="sampling")
    if not all(map(math.isfinite, seal.turn_rewards)):
        raise InvalidTurnError("turn_rewards", "one of them is no finite number")
    for runs in seal.turn_versions:
        _check_versions(runs)
    return seal


def event_of(record: bytes, kind: type[_Event]) -> _Event:
    """Return the event of a record, which must be of this kind."""
    if len(record) > MAX_EVENT_BYTES:
        raise RecordError(f"an event has {len(record)} bytes, more than {MAX_EVENT_BYTES}")
    event = decode_event(record)
    if not isinstance(event, kind):
        raise RecordError(f"the record is {type(event).__name__}, expected {kind.__name__}")
    return event


def _check_key(key: TrajectoryKey, *, expected: TrajectoryKey) -> None:
    if key != expected:
        raise RecordError(f"the record is one of {key.readable_name}, not {expected.readable_name}")
    if key.attempt >= ATTEMPT_LIMIT:
        raise RecordError(f"attempt {key.attempt} is not below {ATTEMPT_LIMIT}")


_LEAST: Final = np.minimum.reduce
_LARGEST: Final = np.maximum.reduce


def _check_values(turn: StoredTurn) -> None:
    """Check what `decode_turn` leaves open: token ids, and numbers that are finite."""
    tokens = turn.token_ids
    if len(tokens) and _LEAST(tokens) < 0:
        raise InvalidTurnError("token_ids", f"{_LEAST(tokens)} is not a token id (0 to 2^31 - 1)")
    logprobs = turn.logprobs
    # Both comparisons are false where there is a NaN.
    if (
        logprobs is not None
        and len(logprobs)
        and not (_LARGEST(logprobs) <= MAX_LOGPROB and _LEAST(logprobs) > -math.inf)
    ):
        raise InvalidTurnError("logprobs", "one of them is not a finite number of at most 0")
    if turn.rewards is not None:
        _check_finite(turn.rewards, field="rewards")
    for name, piece in turn.extras.items():
        if piece.values.dtype.kind == "f":
            _check_finite(piece.values, field=f"extras[{name!r}]")
    _check_versions(turn.version_runs)


def _check_finite(values: Any, *, field: str) -> None:
    if not np.isfinite(values).all():
        raise InvalidTurnError(field, f"one of them is not a finite {values.dtype}")


def _check_versions(runs: tuple[VersionRun, ...]) -> None:
    for version, num_tokens in runs:
        if (version is not None and version < 0) or num_tokens < 1:
            raise InvalidTurnError("version_runs", f"{num_tokens} tokens of version {version}")


MAX_CALLS: Final = 16_384
"""Calls of one request: a publisher sends some thousands."""

MAX_READS: Final = 16
"""Calls of one request that read and write nothing."""

MAX_FIELDS: Final = 1 << 18
"""Fields of the messages of one request: a heartbeat of 30,000 trajectories has 210,000."""

_READS: Final = frozenset({"read_config", "read_waits"})
_ALONE: Final = frozenset({"read_turns", "await_wake", "next_task", "read_group", "list_lapsed"})
"""Kinds of calls that are the only one of their request: their replies may be large, or late."""


class PlannedCalls(NamedTuple):
    """The message of a request, and each of its calls, or why that one is refused."""

    message: wire.Calls
    requests: Sequence[Request | ResponseError]

    def of_run(self, run: str) -> PlannedCalls:
        """Return the same calls for the id of their run."""
        return self._replace(
            requests=[
                each if isinstance(each, ResponseError) else each._replace(run=run)
                for each in self.requests
            ]
        )

    @property
    def alone(self) -> ReadTurns | AwaitWake | None:
        """Return the call that is no script; None for scripts."""
        first = self.requests[0] if self.requests else None
        return first if isinstance(first, ReadTurns | AwaitWake) else None

    @property
    def scripts(self) -> list[ScriptRequest]:
        """Return the calls that are sent."""
        found = [each for each in self.requests if not isinstance(each, ResponseError)]
        return [each for each in found if not isinstance(each, ReadTurns | AwaitWake)]

    def replies(self, sent: Sequence[Any]) -> Iterator[Any]:
        """Yield the reply to each call; takes those of the sent ones in order."""
        left = iter(sent)
        for each in self.requests:
            yield each if isinstance(each, ResponseError) else next(left)


def read_calls(body: bytes, key: ApiKey) -> PlannedCalls:
    """Return the calls of a body for this key; RecordError, or AccessDeniedError for the run."""
    check_fields(body, wire.Calls.DESCRIPTOR, most=MAX_FIELDS)
    message = parse_message(wire.Calls, body)
    kinds = [call.WhichOneof("kind") for call in message.calls]
    if len(kinds) > MAX_CALLS:
        raise RecordError(f"the body has {len(kinds)} calls, at most {MAX_CALLS}: send less")
    if _ALONE.intersection(kinds) and len(kinds) > 1:
        (name, *_) = sorted(_ALONE.intersection(kinds))
        raise RecordError(f"{name} is one of {len(kinds)} calls, expected no other call")
    if (num_reads := sum(kind in _READS for kind in kinds)) > MAX_READS:
        raise RecordError(f"the body has {num_reads} reads, at most {MAX_READS}")
    if kinds and not message.run:
        raise RecordError("the body has calls, and no run")
    run = _run_of(message)
    if run:
        key.require(*ANY_ROLE, run=run)
    writer = checked_name(message.writer, field="writer") if message.writer else ""
    return PlannedCalls(message, [_checked(call, key, run, writer) for call in message.calls])


def _run_of(message: wire.Calls) -> str:
    if not message.run:
        return ""
    return RunId(message.run) if message.is_run_id else checked_run_name(message.run)


def _checked(call: wire.Call, key: ApiKey, run: str, writer: str) -> Any:
    try:
        request = request_of(call, run=run, writer=writer)
        check_request(request, key)
    except AccessDeniedError as error:
        return ResponseError(f"{DENIED} {error}")
    except (TurnstreamError, *UNREADABLE) as error:
        return ResponseError(f"INVALID {error}")
    return request
