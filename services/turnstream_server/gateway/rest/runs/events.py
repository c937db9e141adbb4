"""The events of a run as server-sent events: `GET /v1/runs/{run}/events`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, FastAPI, Header, Query, Request
from fastapi.responses import StreamingResponse

from turnstream.errors import (
    InvalidConfigError,
    RecordError,
    RejectedError,
    ReleasedError,
    StoreUnavailableError,
    UnavailableError,
)
from turnstream.records.encoding import to_plain
from turnstream.records.events import EVENT_NAMES, decode_event, event_name
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run_async, no_such_run
from turnstream.types.names import quoted
from turnstream_server.gateway.bodies import IN_LOOP_BYTES, body_of
from turnstream_server.gateway.rest.caller import Read, RunName, path_run
from turnstream_server.gateway.rest.problems import problem_of
from turnstream_server.gateway.state import Gateway
from turnstream_server.gateway.stream_waits import EntryId
from turnstream_server.keys.limits import Held
from turnstream_server.keys.records import ApiKey, secret_of
from turnstream_server.ledger.core.scan import EventEntry, entry_ms, read_events_async
from turnstream_server.ledger.leadership.leader_fields import last_event_id

logger = logging.getLogger(__name__)

router = APIRouter(tags=["reads"])

EVENT_STREAM: Final = "text/event-stream"
HEARTBEAT_S: Final = 15.0
"""Longest time without a byte: proxies end silent responses after a minute."""

UNREADABLE: Final = "unreadable"
"""Kind of an event whose record is damaged; the planner rejects it."""

MAX_STREAMS: Final = 512
"""Responses at the same time in one process."""

MAX_OF_KEY: Final = 128
"""Responses at the same time for one key."""

BEGINNING: Final = "0-0"
"""Position before the first event."""

_RETRY_S: Final = 0.5
_ID: Final = re.compile(r"\d{1,19}-\d{1,19}")

LastEventId = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        description="Id of the last event that the client has: the stream continues after it.",
        examples=["1700000000123-0"],
    ),
]
Kinds = Annotated[
    str,
    Query(
        description="Kinds of events to send, with commas between them. Default: all.",
        examples=["group_opened,trajectory_sealed"],
    ),
]
Start = Annotated[
    Literal["oldest", "newest"],
    Query(
        description="Without Last-Event-ID: begin at the oldest stored event, or after the newest."
    ),
]


def add_event_state(app: FastAPI) -> None:
    """Add what the responses share."""
    app.state.followers = Held("streams of events", num=MAX_STREAMS, num_of_key=MAX_OF_KEY)


class EventFollower:
    """Reads the events of a run in order, after a position, without a gap.

    Attributes:
        position: id of the newest event that was read; `BEGINNING` before all.
        is_deleted: the run was deleted, and no event follows.
    """

    def __init__(self, gateway: Gateway, run: str, *, after: str) -> None:
        self.position = after
        self.is_deleted = False
        self._gateway = gateway
        self._run = run
        self._names = keys.run_keys(run)
        self._wake_id = BEGINNING

    async def skip(self) -> None:
        """Continue after the newest event."""
        self.position = await last_event_id(self._gateway.client, self._run)

    async def read(self) -> list[EventEntry]:
        """Return the next stored events, at most one slice; none at the end.

        ReleasedError if events after the position may have been deleted.
        """
        client, names = self._gateway.client, self._names
        # A deletion of the run after this read moves the stream `wake`.
        self._wake_id = await self._newest_wake_id()
        entries = await read_events_async(client, self._run, after=self.position)
        with translating():
            pipeline = client.pipeline(transaction=False)
            pipeline.exists(names.frontier)
            pipeline.hget(names.snapshot, "before")
            pipeline.execute_command("XRANGE", names.events, self.position, self.position)
            exists, before, own = await pipeline.execute()
        self.is_deleted = not exists
        if exists and not own:
            self._check_not_before((before or b"0-0").decode())
        if entries:
            self.position = entries[-1].event_id
        return entries

    async def wait(self, *, timeout_s: float) -> None:
        """Return when there may be another event, or the run may be deleted."""
        known = {self._names.events: self.position, self._names.wake: self._wake_id}
        await self._gateway.streams.wait(known, timeout_s=timeout_s)

    async def _newest_wake_id(self) -> str:
        with translating():
            entries: Any = await self._gateway.client.execute_command(
                "XREVRANGE", self._names.wake, "+", "-", "COUNT", 1
            )
        return entries[0][0].decode() if entries else BEGINNING

    def _check_not_before(self, oldest: str) -> None:
        """Refuse a position whose event is not stored, and before the oldest that is kept.

        The oldest events are deleted first. So none is missing after an event that is stored.
        """
        is_beginning = self.position == BEGINNING
        if not is_beginning and EntryId.parse(self.position) < EntryId.parse(oldest):
            raise ReleasedError(
                f"events after {self.position} are no longer stored: begin without Last-Event-ID, "
                f"at {oldest}"
            )


_EXAMPLE: Final = (
    "id: 1700000000123-0\n"
    "event: group_opened\n"
    'data: {"id":"1700000000123-0","at_ms":1700000000123,"kind":"group_opened",'
    '"group_id":"task-7","prompt_uid":"gsm8k-7","num_samples":2,"num_needed":2,"purpose":"train"}'
    "\n\n"
)


@router.get(
    "/runs/{run}/events",
    response_class=StreamingResponse,
    summary="Follow the events of a run",
    responses={
        200: {
            "description": "Server-sent events, until the run is deleted.",
            "content": {EVENT_STREAM: {"schema": {"type": "string"}, "example": _EXAMPLE}},
        }
    },
)
async def get_events(
    request: Request,
    run: RunName,
    caller: Read,
    kinds: Kinds = "",
    start: Start = "oldest",
    last_event_id: LastEventId = None,
) -> StreamingResponse:
    """Send the events of a run as they come, as server-sent events.

    The `id` of an event is its place in the stream. A client that reconnects with Last-Event-ID
    misses no event and gets none twice; if events after it are not stored any more, the status is
    410. A comment is sent every 15 s, and the response ends when the run is deleted.
    """
    wanted = _wanted(kinds)
    after = BEGINNING if last_event_id is None else _checked_id(last_event_id)
    request.app.state.followers.check(caller.key.key_id)
    run_id = await find_run_async(caller.client, run)
    follower = EventFollower(caller.gateway, run_id, after=after)
    if last_event_id is None and start == "newest":
        await follower.skip()
    first = await follower.read()
    if follower.is_deleted:
        raise no_such_run(run_id)
    messages = _messages(request, caller.key, follower, first, wanted=wanted)
    return StreamingResponse(messages, media_type=EVENT_STREAM, headers=_HEADERS)


_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # nginx would buffer


async def _messages(
    request: Request,
    key: ApiKey,
    follower: EventFollower,
    first: list[EventEntry],
    *,
    wanted: Collection[str],
) -> AsyncIterator[str]:
    """Yield the messages of a response, until the run is deleted or the process stops."""
    followers: Held = request.app.state.followers
    clock = asyncio.get_running_loop().time
    entries, sent_s, checked_s = first, clock(), clock()
    try:
        with followers.one_more(key.key_id):
            while True:
                if text := await _encoded(request, entries, wanted):
                    yield text
                    sent_s = clock()
                if follower.is_deleted:
                    return
                if clock() - checked_s >= HEARTBEAT_S:
                    await _check_key(request)
                    checked_s = clock()
                entries = await _next_entries(follower, within_s=sent_s + HEARTBEAT_S - clock())
                if not entries and clock() - sent_s >= HEARTBEAT_S:
                    # An id without data is noted by clients too: they have seen all before it.
                    yield f"id: {follower.position}\n: heartbeat\n\n"
                    sent_s = clock()
    except UnavailableError:
        return  # the process stops
    except RejectedError as error:
        problem = problem_of(error).model_dump_json(exclude_none=True)
        yield f"event: error\ndata: {problem}\n\n"


async def _next_entries(follower: EventFollower, *, within_s: float) -> list[EventEntry]:
    """Return the next events; none after `within_s`, or while the store is away."""
    try:
        if entries := await follower.read():
            return entries
    except StoreUnavailableError as error:
        logger.debug("events: %s", error)
        await asyncio.sleep(_RETRY_S)
        return []
    if not follower.is_deleted:
        await follower.wait(timeout_s=max(0.0, within_s))
    return []


async def _check_key(request: Request) -> None:
    """Raise AccessDeniedError if the key of a request is not accepted any more."""
    gateway: Gateway = request.app.state.gateway
    with contextlib.suppress(UnavailableError):
        key = await gateway.keys.identify(secret_of(request.headers))
        key.require("read", run=path_run(request.path_params["run"]))


async def _encoded(request: Request, entries: Sequence[EventEntry], wanted: Collection[str]) -> str:
    gateway: Gateway = request.app.state.gateway

    def encode() -> str:
        return "".join(_message(entry, wanted) for entry in entries)

    if sum(len(entry.record) for entry in entries) <= IN_LOOP_BYTES:
        return encode()
    return await gateway.parsers.in_thread(encode, owner=body_of(request).owner)


def _message(entry: EventEntry, wanted: Collection[str]) -> str:
    """Return the message of an event; "" for one of another kind."""
    kind, fields = UNREADABLE, {"problem": entry.problem}
    if not entry.problem:
        try:
            event = decode_event(entry.record)
            kind, fields = event_name(event), to_plain(event)
        except RecordError as error:
            fields = {"problem": str(error)}
    if kind not in wanted:
        return ""
    head = {"id": entry.event_id, "at_ms": entry_ms(entry.event_id), "kind": kind}
    data = json.dumps({**head, **fields}, separators=(",", ":"))
    return f"id: {entry.event_id}\nevent: {kind}\ndata: {data}\n\n"


def _wanted(kinds: str) -> frozenset[str]:
    """Return the kinds of a text; InvalidConfigError names an unknown one.

    >>> sorted(_wanted("run_closed,group_opened"))
    ['group_opened', 'run_closed']
    """
    known = (*EVENT_NAMES, UNREADABLE)
    wanted = frozenset(kinds.split(",")) if kinds else frozenset(known)
    for kind in sorted(wanted.difference(known)):
        raise InvalidConfigError("kinds", f"{quoted(kind)} is none of {', '.join(known)}")
    return wanted


def _checked_id(text: str) -> str:
    """Return the id of an event; InvalidConfigError for another text."""
    if _ID.fullmatch(text) is None:
        raise InvalidConfigError("Last-Event-ID", f"{quoted(text)} is not the id of an event")
    return text
