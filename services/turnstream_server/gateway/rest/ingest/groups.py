"""Opening of groups: `POST /v1/runs/{run}/groups`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from turnstream.errors import ConflictError, RejectedError, TurnstreamError
from turnstream.store.waits.read_waits import read_waits_async
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import GroupOpened, TrajectoryKey
from turnstream_server.gateway.rest.access import Caller
from turnstream_server.gateway.rest.bodies import ARROW, ARROW_BODY, JSON, json_body
from turnstream_server.gateway.rest.ingest import examples
from turnstream_server.gateway.rest.ingest.arrow_bodies import parse_groups
from turnstream_server.gateway.rest.ingest.delivery import open_groups
from turnstream_server.gateway.rest.ingest.items import GroupsBody
from turnstream_server.gateway.rest.ingest.json_bodies import parse_body
from turnstream_server.gateway.rest.ingest.places import RunWriter, Slot, Slots
from turnstream_server.gateway.rest.ingest.requests import UNSUPPORTED, Call
from turnstream_server.gateway.rest.ingest.results import (
    GroupResults,
    as_json,
    item_problem,
    results_response,
)
from turnstream_server.gateway.rest.ingest.writes import Opening
from turnstream_server.gateway.rest.problems import Problem

router = APIRouter(tags=["ingest"])


@router.post(
    "/runs/{run}/groups",
    response_model=GroupResults,
    summary="Open groups",
    responses={
        **UNSUPPORTED,
        200: {
            "description": "One result per item.",
            "content": {JSON: {"example": examples.GROUP_RESULTS}},
        },
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                JSON: json_body(GroupsBody, example=examples.GROUPS),
                ARROW: ARROW_BODY,
            },
        }
    },
)
async def post_groups(call: Call) -> Response:
    """Open groups, and their samples for the writer of the request, as JSON or as an Arrow stream.

    Opening waits for nothing: a group that the run does not admit now has the status 429 and the
    reasons. Opening a group again with the same content has the same result.
    """
    openings = await call.parsed(json=_parse_groups, arrow=parse_groups)
    async with call.lend(key for each in openings for key in each.members) as (lent, slots):
        found = await _open(call.caller, lent, slots, openings)
    return await _response(call.caller, lent, openings, found)


def _parse_groups(body: bytes) -> list[Opening]:
    return parse_body(body, GroupsBody).openings()


async def _open(
    caller: Caller,
    lent: RunWriter,
    slots: Slots,
    openings: Sequence[Opening],
) -> list[list[int] | TurnstreamError]:
    """Return the open samples of each group, or why it is not open."""
    groups: dict[GroupOpened, dict[TrajectoryKey, None]] = {}
    for group, members in openings:
        groups.setdefault(group, {}).update(dict.fromkeys(members))
    opened = await open_groups(caller.client, lent.publisher, groups)
    by_group = dict(zip(groups, opened, strict=True))
    for group, epochs in by_group.items():
        if isinstance(epochs, TurnstreamError):
            continue
        new = {key: epoch for key, epoch in epochs.items() if not _is_open(slots[key])}
        for writer in lent.publisher.opened(group, new):
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


async def _response(
    caller: Caller,
    lent: RunWriter,
    openings: Sequence[Opening],
    found: Sequence[list[int] | TurnstreamError],
) -> Response:
    snapshot = None
    if any(is_wait(each) for each in found if isinstance(each, TurnstreamError)):
        snapshot = await read_waits_async(caller.client, lent.publisher.run)
    results: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for index, ((group, _), each) in enumerate(zip(openings, found, strict=True)):
        head = {"index": index, "group_id": group.group_id}
        if isinstance(each, TurnstreamError):
            why = reasons(snapshot, group=group) if is_wait(each) else ()
            problem = item_problem(each, field=f"items.{index}", reasons=why)
            problems.append(problem)
            results.append({**head, "status": problem.status, "problem": as_json(problem)})
        else:
            results.append({**head, "status": 201, "open_samples": each})
    return results_response(results, problems)


def is_wait(error: TurnstreamError) -> bool:
    """Whether a group is not admitted now, and may be later."""
    if not isinstance(error, RejectedError) or isinstance(error, ConflictError):
        return False
    return error.retry_after_s is not None
