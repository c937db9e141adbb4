"""Turns and whole trajectories: `POST /v1/runs/{run}/turns` and `.../trajectories`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi import APIRouter
from fastapi.responses import Response

from turnstream.store.waits.read_waits import read_waits_async
from turnstream.store.waits.wait_reasons import reasons
from turnstream_server.gateway.rest.access import Caller
from turnstream_server.gateway.rest.bodies import ARROW, ARROW_BODY, JSON, json_body
from turnstream_server.gateway.rest.ingest import examples
from turnstream_server.gateway.rest.ingest.arrow_bodies import parse_trajectories, parse_turns
from turnstream_server.gateway.rest.ingest.delivery import Delivery, Outcome
from turnstream_server.gateway.rest.ingest.groups import is_wait
from turnstream_server.gateway.rest.ingest.items import TrajectoriesBody, TurnsBody
from turnstream_server.gateway.rest.ingest.json_bodies import parse_body
from turnstream_server.gateway.rest.ingest.observing import observe_writes
from turnstream_server.gateway.rest.ingest.places import RunWriter
from turnstream_server.gateway.rest.ingest.requests import UNSUPPORTED, Call, IngestCall
from turnstream_server.gateway.rest.ingest.results import (
    WriteResults,
    as_json,
    item_problem,
    results_response,
)
from turnstream_server.gateway.rest.ingest.writes import Write
from turnstream_server.gateway.rest.problems import Problem

router = APIRouter(tags=["ingest"])

_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    **UNSUPPORTED,
    200: {
        "description": "One result per item.",
        "content": {JSON: {"example": examples.WRITE_RESULTS}},
    },
}


@router.post(
    "/runs/{run}/turns",
    response_model=WriteResults,
    summary="Append turns",
    responses=_RESPONSES,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                JSON: json_body(TurnsBody, example=examples.TURNS),
                ARROW: ARROW_BODY,
            },
        }
    },
)
async def post_turns(call: Call) -> Response:
    """Append turns of trajectories, and seal or abandon them, as JSON or as an Arrow IPC stream.

    The first turn of a trajectory opens it. The same turn again has the same result, and with
    another content the status 409. The response comes when the store has all of it.
    """
    return await _delivered(call, await call.parsed(json=_parse_turns, arrow=parse_turns))


@router.post(
    "/runs/{run}/trajectories",
    response_model=WriteResults,
    summary="Send whole trajectories",
    responses=_RESPONSES,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                JSON: json_body(TrajectoriesBody, example=examples.TRAJECTORIES),
                ARROW: ARROW_BODY,
            },
        }
    },
)
async def post_trajectories(call: Call) -> Response:
    """Send whole trajectories, with all turns and the seal, as JSON or as an Arrow IPC stream.

    The same trajectory again has the same result, and with another content the status 409.
    """
    writes = await call.parsed(json=_parse_trajectories, arrow=parse_trajectories)
    return await _delivered(call, writes)


def _parse_turns(body: bytes) -> list[Write]:
    return parse_body(body, TurnsBody).writes()


def _parse_trajectories(body: bytes) -> list[Write]:
    return parse_body(body, TrajectoriesBody).writes()


async def _delivered(call: IngestCall, writes: Sequence[Write]) -> Response:
    async with call.lend(write.key for write in writes) as (lent, slots):
        outcomes = await Delivery(lent, call.caller.client, slots).deliver(writes)
        observe_writes(lent.publisher.run, writes, outcomes)
    return await _response(call.caller, lent, writes, outcomes)


async def _response(
    caller: Caller, lent: RunWriter, writes: Sequence[Write], outcomes: Sequence[Outcome]
) -> Response:
    snapshot = None
    if any(each.error is not None and is_wait(each.error) for each in outcomes):
        snapshot = await read_waits_async(caller.client, lent.publisher.run)
    results: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for write, (error, next_turn) in zip(writes, outcomes, strict=True):
        group_id, sample, attempt = write.key
        result: dict[str, Any] = {"index": write.item, "status": 201, "group_id": group_id}
        result |= {"sample": sample, "attempt": attempt}
        if error is None:
            result["state"] = write.state
        else:
            why = reasons(snapshot, group=write.group) if is_wait(error) else ()
            problem = item_problem(error, field=f"items.{write.item}", reasons=why)
            problems.append(problem)
            result |= {"status": problem.status, "problem": as_json(problem)}
        if next_turn is not None:
            result["next_turn"] = next_turn
        results.append(result)
    return results_response(results, problems)
