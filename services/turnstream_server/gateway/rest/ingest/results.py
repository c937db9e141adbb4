"""Bodies and results of requests with several items, as the OpenAPI document shows them."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, Field

from turnstream.http.problems import MEDIA_TYPE
from turnstream_server.gateway.rest.bodies import JSON
from turnstream_server.gateway.rest.problems import Problem

UNSUPPORTED: Final[dict[int | str, dict[str, Any]]] = {
    415: {
        "model": Problem,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        "description": "Content-Type or Content-Encoding is not supported.",
    }
}


class _Result(BaseModel):
    index: int = Field(description="Place of the item in the request, from 0.")
    status: int = Field(description="201 if it is stored, else that of the problem.")
    group_id: str
    problem: Problem | None = Field(None, description="Absent if the item is stored.")


class GroupResult(_Result):
    """The result of an opened group."""

    open_samples: list[int] | None = Field(
        None, description="Samples that are open for this writer; absent with a problem."
    )


class GroupResults(BaseModel):
    """One result per item, in the same order."""

    results: list[GroupResult]


class TrajectoryResult(_Result):
    """The result of an item that names a trajectory."""

    sample: int
    attempt: int


class WriteResult(TrajectoryResult):
    """The result of a turn or a trajectory."""

    state: Literal["open", "sealed", "awaiting_reward", "abandoned"] | None = Field(
        None, description="State after this item; absent with a problem."
    )
    next_turn: int | None = Field(None, description="Index of the next turn, if it is known.")


class WriteResults(BaseModel):
    """One result per item, in the same order."""

    results: list[WriteResult]


def described_results(example: Any) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of the responses of a route with a result per item."""
    content = {JSON: {"example": example}}
    return {**UNSUPPORTED, 200: {"description": "One result per item.", "content": content}}


GROUPS: Final[dict[str, Any]] = {
    "items": [{"group_id": "task-7", "num_samples": 2, "prompt_uid": "gsm8k-7"}]
}
GROUP_RESULTS: Final[dict[str, Any]] = {
    "results": [{"index": 0, "status": 201, "group_id": "task-7", "open_samples": [0, 1]}]
}
TURNS: Final[dict[str, Any]] = {
    "items": [
        {
            "group_id": "task-7",
            "sample": 0,
            "num_samples": 2,
            "turn": 0,
            "prompt_ids": [11, 12, 13],
            "response_ids": [21, 22],
            "logprobs": [-0.5, -1.25],
            "policy_version": 3,
        },
        {
            "group_id": "task-7",
            "sample": 0,
            "turn": 1,
            "prompt_ids": [11, 12, 13, 21, 22, 31],
            "response_ids": [41],
            "logprobs": [-0.75],
            "policy_version": 3,
            "seal": {"reward": 1.0, "tags": {"task": "gsm8k"}},
        },
    ]
}
TRAJECTORIES: Final[dict[str, Any]] = {
    "items": [
        {
            "group_id": "task-8",
            "sample": 0,
            "num_samples": 1,
            "turns": [{"prompt_ids": [11, 12], "response_ids": [21], "logprobs": [-0.5]}],
            "reward": 1.0,
        }
    ]
}
WRITE_RESULTS: Final[dict[str, Any]] = {
    "results": [
        {
            "index": 0,
            "status": 201,
            "group_id": "task-7",
            "sample": 0,
            "attempt": 0,
            "state": "open",
            "next_turn": 1,
        },
        {
            "index": 1,
            "status": 409,
            "group_id": "task-7",
            "sample": 1,
            "attempt": 0,
            "next_turn": 0,
            "problem": {
                "type": "https://turnstream.dev/problems/turn-gap",
                "title": "An earlier turn is missing",
                "status": 409,
                "detail": "turn 1 of task-7/1/0 does not follow: the next turn is turn 0",
            },
        },
    ]
}
