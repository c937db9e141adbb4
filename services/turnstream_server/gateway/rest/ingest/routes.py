"""Routes of groups, turns and whole trajectories: `POST /v1/runs/{run}/groups` and others."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fastapi import APIRouter
from fastapi.responses import Response

from turnstream.errors import TurnstreamError
from turnstream.types import GroupOpened, TrajectoryKey
from turnstream_server.gateway.rest.bodies import described_body
from turnstream_server.gateway.rest.ingest import arrow_bodies, examples, json_bodies
from turnstream_server.gateway.rest.ingest.delivery import Delivery, Outcome, open_groups
from turnstream_server.gateway.rest.ingest.publishers import RunWriter, Slot, Slots
from turnstream_server.gateway.rest.ingest.requests import Call, IngestCall
from turnstream_server.gateway.rest.ingest.results import (
    Answered,
    GroupResults,
    WriteResults,
    described_results,
    respond,
)
from turnstream_server.gateway.rest.ingest.writes import Opening, Write
from turnstream_server.telemetry.instruments import counter

router = APIRouter(tags=["ingest"])
logger = logging.getLogger(__name__)

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


@router.post(
    "/runs/{run}/groups",
    response_model=GroupResults,
    summary="Open groups",
    responses=described_results(examples.GROUP_RESULTS),
    openapi_extra=described_body(json_bodies.GroupsBody, example=examples.GROUPS, has_arrow=True),
)
async def post_groups(call: Call) -> Response:
    """Open groups, and their samples for the writer of the request, as JSON or as an Arrow stream.

    Opening waits for nothing: a group that the run does not admit now has the status 429 and the
    reasons. Opening a group again with the same content has the same result.
    """
    openings = await call.parsed(json=json_bodies.parse_groups, arrow=arrow_bodies.parse_groups)
    async with call.borrow(key for each in openings for key in each.members) as (run_writer, slots):
        found = await _open(call, run_writer, slots, openings)
    answered = [
        Answered(
            {"group_id": group.group_id},
            {} if isinstance(each, TurnstreamError) else {"open_samples": each},
            each if isinstance(each, TurnstreamError) else None,
            group,
        )
        for (group, _), each in zip(openings, found, strict=True)
    ]
    return await respond(call.caller.client, run_writer.publisher.run, answered)


@router.post(
    "/runs/{run}/turns",
    response_model=WriteResults,
    summary="Append turns",
    responses=described_results(examples.WRITE_RESULTS),
    openapi_extra=described_body(json_bodies.TurnsBody, example=examples.TURNS, has_arrow=True),
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
    response_model=WriteResults,
    summary="Send whole trajectories",
    responses=described_results(examples.WRITE_RESULTS),
    openapi_extra=described_body(
        json_bodies.TrajectoriesBody, example=examples.TRAJECTORIES, has_arrow=True
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
    async with call.borrow(write.key for write in writes) as (run_writer, slots):
        outcomes = await Delivery(run_writer, call.caller.client, slots).deliver(writes)
        _observe(run_writer.publisher.run, writes, outcomes)
    answered = [
        Answered(
            write.key._asdict() | ({} if next_turn is None else {"next_turn": next_turn}),
            {"state": write.state},
            error,
            write.group,
        )
        for write, (error, next_turn) in zip(writes, outcomes, strict=True)
    ]
    return await respond(call.caller.client, run_writer.publisher.run, answered)


async def _open(
    call: IngestCall,
    run_writer: RunWriter,
    slots: Slots,
    openings: Sequence[Opening],
) -> list[list[int] | TurnstreamError]:
    """Return the open samples of each group, or why it is not open."""
    groups: dict[GroupOpened, dict[TrajectoryKey, None]] = {}
    for group, members in openings:
        groups.setdefault(group, {}).update(dict.fromkeys(members))
    opened = await open_groups(call.caller.client, run_writer.publisher, groups)
    by_group = dict(zip(groups, opened, strict=True))
    for group, epochs in by_group.items():
        if isinstance(epochs, TurnstreamError):
            continue
        new = {key: epoch for key, epoch in epochs.items() if not _is_open(slots[key])}
        for writer in run_writer.publisher.opened(group, new):
            slots[writer.key].writer = writer
    found: list[list[int] | TurnstreamError] = []
    for group, members in openings:
        epochs = by_group[group]
        if isinstance(epochs, TurnstreamError):
            found.append(epochs)
        else:
            found.append([key.sample for key in members if key in epochs])
    return found


def _is_open(slot: Slot) -> bool:
    return slot.writer is not None and slot.writer.error is None


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
            logger.debug("stored" if is_stored else "refused: %s", *_reason(outcome), extra=facts)


def _reason(outcome: Outcome) -> tuple[object, ...]:
    return () if outcome.error is None else (outcome.error,)
