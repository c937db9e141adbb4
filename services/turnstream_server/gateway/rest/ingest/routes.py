"""Routes of groups, turns and whole trajectories: `POST /v1/runs/{run}/groups` and others."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import redis.asyncio
from fastapi import APIRouter, Depends, FastAPI, Header, Request
from fastapi.responses import Response

from turnstream.errors import (
    ConflictError,
    InvalidTurnError,
    RejectedError,
    TurnstreamError,
    WaitReason,
)
from turnstream.store.waits.read_waits import read_waits_async
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import GroupOpened, TrajectoryKey
from turnstream_server.gateway.bodies import json_response
from turnstream_server.gateway.rest.bodies import (
    ARROW,
    JSON,
    described_body,
    media_type_of,
    read_content,
)
from turnstream_server.gateway.rest.caller import Caller, Produce, RunName
from turnstream_server.gateway.rest.ingest import arrow_bodies, json_bodies, results
from turnstream_server.gateway.rest.ingest.delivery import Delivery, Outcome
from turnstream_server.gateway.rest.ingest.publishers import Publishers
from turnstream_server.gateway.rest.ingest.writes import Write
from turnstream_server.gateway.rest.problems import Problem, named_reasons, problem_of, response
from turnstream_server.gateway.state import Gateway
from turnstream_server.keys.records import ApiKey
from turnstream_server.telemetry.instruments import counter

router = APIRouter(tags=["ingest"])
logger = logging.getLogger(__name__)

_Parsed = TypeVar("_Parsed")

MAX_KEYS: Final = 10_000
"""Idempotency keys that a process remembers, the newest."""


_DEFAULT_RETRY_S: Final = 1.0
_OF_WHOLE_RESPONSE: Final = (404, 429, 503)
"""Statuses that are those of the response, if all items have the same."""

WriterName = Annotated[
    str | None,
    Header(
        alias="X-Turnstream-Writer",
        min_length=1,
        max_length=128,
        description="Name of the generator process, which holds the leases of its trajectories. By "
        "default all requests of a key are one writer.",
        examples=["generator-7"],
    ),
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=256,
        description="Name of the request. The same key with another body is refused.",
        examples=["7c1a9a6e-7f9b-4c8e-9f0e-2f3f0a4d1b7e"],
    ),
]

_TRAJECTORIES = counter(
    "turnstream_gateway_ingested_trajectories",
    "Trajectories of requests that were sealed, abandoned, or refused.",
    ["outcome"],
)
_TURNS = counter(
    "turnstream_gateway_ingested_turns",
    "Turns of requests that were stored, or refused.",
    ["outcome"],
)
_TOKENS = counter(
    "turnstream_gateway_ingested_tokens",
    "Prompt and response tokens of the stored turns of requests.",
)


class RequestKeys:
    """The newest idempotency keys, with hashes of the bodies that came with them.

    Writes are idempotent by their content. A key only guards against its use for another body.
    """

    def __init__(self) -> None:
        self._hashes: OrderedDict[tuple[str, ...], bytes] = OrderedDict()

    def check(self, found: bytes, *scope: str) -> None:
        """Raise InvalidTurnError if the same key came with a body of another hash."""
        known = self._hashes.setdefault(scope, found)
        self._hashes.move_to_end(scope)
        if len(self._hashes) > MAX_KEYS:
            self._hashes.popitem(last=False)
        if known != found:
            raise InvalidTurnError(
                "Idempotency-Key", f"{scope[-1]!r} was used with another body: choose another key"
            )


def writer_of(key: ApiKey) -> str:
    """Return the writer of the requests of a key that name none."""
    return f"http-{key.name}"


def add_ingest_state(app: FastAPI, gateway: Gateway) -> None:
    """Add what the ingest routes share; publishers are closed with the resources of the gateway."""
    publishers = Publishers(gateway.options.redis_url, gateway.client)
    gateway.resources.push_async_callback(publishers.close)
    app.state.publishers = publishers
    app.state.request_keys = RequestKeys()


class IngestCall:
    """One request of an ingest route, and the writer that it stands for."""

    def __init__(
        self, request: Request, run: str, caller: Caller, writer: str | None, key: str | None
    ) -> None:
        self.run = run
        self.caller = caller
        self.writer_name = writer or writer_of(caller.key)
        self._is_shared = writer is None
        self._request = request
        self._key = key

    async def parsed(
        self, *, json: Callable[[bytes], _Parsed], arrow: Callable[[bytes], _Parsed]
    ) -> _Parsed:
        """Return the body as its parser, a function of a module, returns it; see `Parsers.run`.

        InvalidTurnError for an idempotency key that came with another body; others as of
        `media_type_of`, `read_content` and the parser.
        """
        media_type = media_type_of(self._request, accepted=(JSON, ARROW))
        body = await read_content(self._request, media_type=media_type)
        is_json = media_type == JSON
        parsed, found = await self.caller.gateway.parsers.run(
            functools.partial(_parsed, json if is_json else arrow, self._key is not None),
            body,
            owner=self.caller.key.owner,
            is_json=is_json,
        )
        if self._key is not None:
            known: RequestKeys = self._request.app.state.request_keys
            known.check(found, self.caller.key.key_id, self._request.url.path, self._key)
        return parsed

    @contextlib.asynccontextmanager
    async def delivery(self, keys: Iterable[TrajectoryKey]) -> AsyncIterator[Delivery]:
        """Yield the delivery of the request, whose trajectories are locked in the block."""
        publishers: Publishers = self._request.app.state.publishers
        owner, is_shared = self.caller.key.owner, self._is_shared
        async with publishers.borrow(
            self.run, self.writer_name, keys, owner=owner, is_shared=is_shared
        ) as (run_writer, slots):
            yield Delivery(run_writer, self.caller.client, slots)


def _parsed(parse: Callable[[bytes], _Parsed], has_key: bool, body: bytes) -> tuple[_Parsed, bytes]:
    """Return the content of a body, and its hash if the request has an idempotency key."""
    return parse(body), hashlib.blake2b(body, digest_size=16).digest() if has_key else b""


async def _ingest_call(  # a class would be called in a thread
    request: Request,
    run: RunName,
    caller: Produce,
    writer: WriterName = None,
    key: IdempotencyKey = None,
) -> IngestCall:
    return IngestCall(request, run, caller, writer, key)


Call = Annotated[IngestCall, Depends(_ingest_call)]


@router.post(
    "/runs/{run}/groups",
    response_model=results.GroupResults,
    summary="Open groups",
    responses=results.described_results(results.GROUP_RESULTS),
    openapi_extra=described_body(json_bodies.GroupsBody, example=results.GROUPS, has_arrow=True),
)
async def post_groups(call: Call) -> Response:
    """Open groups, and their samples for the writer of the request, as JSON or as an Arrow stream.

    Opening waits for nothing: a group that the run does not admit now has the status 429 and the
    reasons. Opening a group again with the same content has the same result.
    """
    openings = await call.parsed(json=json_bodies.parse_groups, arrow=arrow_bodies.parse_groups)
    async with call.delivery(key for each in openings for key in each.members) as delivery:
        opened = await delivery.open_members(openings)
    answered: list[Answered] = []
    for group, members in openings:
        name, found = {"group_id": group.group_id}, opened[group]
        if isinstance(found, TurnstreamError):
            answered.append(Answered(name, {}, found, group))
        else:
            samples = [key.sample for key in members if key in found]
            answered.append(Answered(name, {"open_samples": samples}))
    return await respond(call.caller.client, delivery.run_writer.run, answered)


@router.post(
    "/runs/{run}/turns",
    response_model=results.WriteResults,
    summary="Append turns",
    responses=results.described_results(results.WRITE_RESULTS),
    openapi_extra=described_body(json_bodies.TurnsBody, example=results.TURNS, has_arrow=True),
)
async def post_turns(call: Call) -> Response:
    """Append turns of trajectories, and seal or abandon them, as JSON or as an Arrow IPC stream.

    The first turn of a trajectory opens it. The same turn again has the same result, and with
    another content the status 409. The response comes when the store has all of it.
    """
    writes = await call.parsed(json=json_bodies.parse_turns, arrow=arrow_bodies.parse_turns)
    return await _delivered(call, writes)


@router.post(
    "/runs/{run}/trajectories",
    response_model=results.WriteResults,
    summary="Send whole trajectories",
    responses=results.described_results(results.WRITE_RESULTS),
    openapi_extra=described_body(
        json_bodies.TrajectoriesBody, example=results.TRAJECTORIES, has_arrow=True
    ),
)
async def post_trajectories(call: Call) -> Response:
    """Send whole trajectories, with all turns and the seal, as JSON or as an Arrow IPC stream.

    The same trajectory again has the same result, and with another content the status 409.
    """
    writes = await call.parsed(
        json=json_bodies.parse_trajectories, arrow=arrow_bodies.parse_trajectories
    )
    return await _delivered(call, writes)


async def _delivered(call: IngestCall, writes: Sequence[Write]) -> Response:
    async with call.delivery(write.key for write in writes) as delivery:
        outcomes = await delivery.deliver(writes)
    run = delivery.run_writer.run
    _observe(run, writes, outcomes)
    answered = [
        Answered(
            write.key._asdict() | ({} if next_turn is None else {"next_turn": next_turn}),
            {"state": write.state},
            error,
            write.group,
        )
        for write, (error, next_turn) in zip(writes, outcomes, strict=True)
    ]
    return await respond(call.caller.client, run, answered)


def _observe(run: str, writes: Sequence[Write], outcomes: Sequence[Outcome]) -> None:
    """Count the writes of a request, and log each at level DEBUG."""
    is_logged = logger.isEnabledFor(logging.DEBUG)
    for write, outcome in zip(writes, outcomes, strict=True):
        is_stored = outcome.error is None
        if not is_stored:
            _TRAJECTORIES.labels("refused").inc()
        elif write.state != "open":
            _TRAJECTORIES.labels("abandoned" if write.state == "abandoned" else "sealed").inc()
        _TURNS.labels("stored" if is_stored else "refused").inc(len(write.turns))
        if is_stored:
            turns = (each.turn for each in write.turns)
            _TOKENS.inc(sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in turns))
        if is_logged:
            facts = {"run": run, "trajectory": write.key.trajectory_id}
            facts |= {"state": write.state, "turns": len(write.turns)}
            how = "stored" if is_stored else f"refused: {outcome.error}"
            logger.debug("%s", how, extra=facts)


class Answered(NamedTuple):
    """The outcome of one item of a request.

    Attributes:
        head: fields of its result that name it.
        stored: further fields of its result if it is stored.
    """

    head: Mapping[str, Any]
    stored: Mapping[str, Any]
    error: TurnstreamError | None = None
    group: GroupOpened | None = None


async def respond(client: redis.asyncio.Redis, run: str, answered: Iterable[Answered]) -> Response:
    """Return the response with a result per item, or a problem whose status all items have.

    The state of the run is read if a group is not admitted, for the reasons.
    """
    items = [*answered]
    snapshot = None
    if any(is_wait(each.error) for each in items):
        snapshot = await read_waits_async(client, run)
    results: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for index, (head, stored, error, group) in enumerate(items):
        result = {"index": index, "status": 201, **head}
        if error is None:
            results.append({**result, **stored})
            continue
        why = reasons(snapshot, group=group) if is_wait(error) else ()
        problem = _item_problem(error, field=f"items.{index}", reasons=why)
        problems.append(problem)
        content = problem.model_dump(exclude_none=True)
        results.append({**result, "status": problem.status, "problem": content})
    statuses = {problem.status for problem in problems}
    if len(statuses) == 1 and len(problems) == len(results) and statuses <= {*_OF_WHOLE_RESPONSE}:
        return response(max(problems, key=lambda each: each.retry_after_s or 0.0))
    return json_response({"results": results})


def is_wait(error: TurnstreamError | None) -> bool:
    """Whether a group is not admitted now, and may be later."""
    if not isinstance(error, RejectedError) or isinstance(error, ConflictError):
        return False
    return error.retry_after_s is not None


def _item_problem(error: TurnstreamError, *, field: str, reasons: Sequence[WaitReason]) -> Problem:
    """Return the problem of an item at this path; the reasons are those of a 429."""
    problem = problem_of(error)
    if isinstance(error, InvalidTurnError):
        problem.field = f"{field}.{error.field}"
        problem.detail = f"{field}.{problem.detail}"
    if problem.status != 429:
        return problem
    if problem.retry_after_s is None:
        problem.retry_after_s = _DEFAULT_RETRY_S
    problem.reasons = [*(problem.reasons or ()), *(named_reasons(reasons) or ())] or None
    return problem
