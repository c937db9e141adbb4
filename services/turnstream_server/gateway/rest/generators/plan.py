"""The calls of one body: which are sent to the store, and how their replies become the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from redis.exceptions import ResponseError

from turnstream.errors import AccessDeniedError, RecordError, TurnstreamError
from turnstream.generator.encode.group_checks import checked_name
from turnstream.generator.requests import AwaitWake, ReadTurns, Request, ScriptRequest
from turnstream.generator.transport.messages import request_of
from turnstream.records.encoding import UNREADABLE, parse_message
from turnstream.store.client.replies import DENIED
from turnstream.types.names import RunId, checked_run_name
from turnstream.wire.v1 import calls_pb2 as wire
from turnstream_server.gateway.rest.generators.checks import ANY_ROLE, check_request
from turnstream_server.gateway.tinker.message_fields import check_fields
from turnstream_server.keys.records import ApiKey

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
