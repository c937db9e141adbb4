"""Results of requests with several items: one per item, and the status of the response."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import redis.asyncio
from fastapi.responses import Response
from pydantic import BaseModel, Field

from turnstream.errors import (
    ConflictError,
    InvalidTurnError,
    RejectedError,
    TurnstreamError,
    WaitReason,
)
from turnstream.http.problems import MEDIA_TYPE
from turnstream.store.waits.read_waits import read_waits_async
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import GroupOpened
from turnstream_server.gateway.bodies import json_response
from turnstream_server.gateway.rest.bodies import JSON
from turnstream_server.gateway.rest.problems import (
    Problem,
    named_reasons,
    problem_of,
    response,
)

UNSUPPORTED: Final[dict[int | str, dict[str, Any]]] = {
    415: {
        "model": Problem,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        "description": "Content-Type or Content-Encoding is not supported.",
    }
}

_DEFAULT_RETRY_S: Final = 1.0
_OF_WHOLE_RESPONSE: Final = (404, 429, 503)
"""Statuses that are those of the response, if all items have the same."""


class _Result(BaseModel):
    index: int = Field(description="Place of the item in the request, from 0.")
    status: int = Field(description="201 if it is stored, else that of the problem.")
    group_id: str


class GroupResult(_Result):
    """The result of an opened group."""

    open_samples: list[int] | None = Field(
        None, description="Samples that are open for this writer; absent with a problem."
    )
    problem: Problem | None = Field(None, description="Absent if the group is open.")


class GroupResults(BaseModel):
    """One result per item, in the same order."""

    results: list[GroupResult]


class WriteResult(_Result):
    """The result of a turn or a trajectory."""

    sample: int
    attempt: int
    state: Literal["open", "sealed", "awaiting_reward", "abandoned"] | None = Field(
        None, description="State after this item; absent with a problem."
    )
    next_turn: int | None = Field(None, description="Index of the next turn, if it is known.")
    problem: Problem | None = Field(None, description="Absent if the item is stored.")


class WriteResults(BaseModel):
    """One result per item, in the same order."""

    results: list[WriteResult]


def described_results(example: Any) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of the responses of a route with a result per item."""
    content = {JSON: {"example": example}}
    return {**UNSUPPORTED, 200: {"description": "One result per item.", "content": content}}


class Answered(NamedTuple):
    """The outcome of one item of a request.

    Attributes:
        head: fields of its result that name it.
        stored: further fields of its result if it is stored.
        error: why it is not stored; None if it is.
        group: the group that it opens; None if it opens none.
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
    """Return the problem of an item.

    Args:
        error: why it is refused.
        field: path of the item, before the field of the error.
        reasons: why the run admits no group now; used for a 429.
    """
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
