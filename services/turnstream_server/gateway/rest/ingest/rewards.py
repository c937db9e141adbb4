"""Rewards that come after the seal: `POST /v1/runs/{run}/rewards`."""

from __future__ import annotations

import functools
from typing import Any, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, StrictFloat, StrictInt, StrictStr

from turnstream.errors import RunNotFoundError, TurnstreamError
from turnstream.store.client.run_ids import find_run_async
from turnstream.store.client.scripts import Command, run_commands_async
from turnstream.store.run.rewards import encode_reward, outcome_of, post_reward_command
from turnstream.types import TrajectoryKey
from turnstream_server.gateway.rest.bodies import (
    MAX_ITEMS,
    Body,
    described_body,
    parse_body,
    parsed_json,
)
from turnstream_server.gateway.rest.caller import Produce, RunName
from turnstream_server.gateway.rest.ingest.results import TrajectoryResult, described_results
from turnstream_server.gateway.rest.ingest.routes import Answered, respond
from turnstream_server.gateway.rest.ingest.writes import named_fields

router = APIRouter(tags=["ingest"])

_PER_CALL: Final = 256
"""Rewards of one round trip: the store does nothing else for some milliseconds."""

_EXAMPLE: Final = {"items": [{"group_id": "task-7", "sample": 0, "reward": 1.0}]}
_RESULTS: Final = {
    "results": [
        {
            "index": 0,
            "status": 201,
            "group_id": "task-7",
            "sample": 0,
            "attempt": 0,
            "outcome": "posted",
        }
    ]
}


class RewardItem(Body):
    """The reward of a trajectory that was sealed with `awaits_reward`."""

    group_id: StrictStr
    sample: StrictInt = Field(ge=0)
    attempt: StrictInt = Field(0, ge=0)
    reward: StrictFloat | None = Field(None, description="Outcome of the whole episode.")
    reward_components: dict[StrictStr, StrictFloat] | None = Field(
        None, description="Named rewards, which are added to those of the seal."
    )

    @property
    def key(self) -> TrajectoryKey:
        """Return the key of the trajectory."""
        return TrajectoryKey(self.group_id, self.sample, self.attempt)


class RewardsBody(Body):
    """Rewards to post."""

    items: list[RewardItem] = Field(max_length=MAX_ITEMS)


class RewardResult(TrajectoryResult):
    """The result of a posted reward."""

    outcome: Literal["posted", "duplicate", "late"] | None = Field(
        None,
        description="`duplicate`: the same was posted before. `late`: the group was decided "
        "before, and the reward changes nothing. Absent with a problem.",
    )


class RewardResults(BaseModel):
    """One result per item, in the same order."""

    results: list[RewardResult]


@router.post(
    "/runs/{run}/rewards",
    response_model=RewardResults,
    summary="Post rewards",
    responses=described_results(_RESULTS),
    openapi_extra=described_body(RewardsBody, example=_EXAMPLE),
)
async def post_rewards(request: Request, run: RunName, caller: Produce) -> Response:
    """Post rewards of trajectories that were sealed with `awaits_reward`.

    The same reward again changes nothing. If an item is malformed, none is posted.
    """
    run_id = await find_run_async(caller.client, run)
    parse = functools.partial(_commands, run_id)
    items, commands = await parsed_json(request, parse, owner=caller.key.owner)
    replies: list[Any] = []
    for first in range(0, len(commands), _PER_CALL):
        some = commands[first : first + _PER_CALL]
        replies += await run_commands_async(caller.client, some)
    return await respond(caller.client, run_id, map(_answered, items, replies))


def _commands(run: str, content: bytes) -> tuple[list[RewardItem], list[Command]]:
    body = parse_body(content, RewardsBody)
    commands: list[Command] = []
    for number, item in enumerate(body.items):
        with named_fields("items", number):
            posted = encode_reward(item.key, item.reward, item.reward_components)
        commands.append(post_reward_command(run, *posted))
    return body.items, commands


def _answered(item: RewardItem, reply: Any) -> Answered:
    if isinstance(reply, RunNotFoundError):
        raise reply
    if isinstance(reply, TurnstreamError):
        return Answered(item.key._asdict(), {}, reply)
    return Answered(item.key._asdict(), {"outcome": outcome_of(reply).name.lower()})
