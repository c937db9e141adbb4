"""The ledger of a run, the history of one trajectory, and the reasons why a run waits."""

from __future__ import annotations

from typing import Annotated, Any

import redis
from fastapi import APIRouter, Path, Query
from fastapi.responses import Response

from turnstream.store.run.configs import open_run
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import TrajectoryState
from turnstream_server.gateway.rest.caller import Read, RunName
from turnstream_server.gateway.rest.runs.models import Ledger, Waits
from turnstream_server.ledger.queries.ledger_facts import ledger_facts
from turnstream_server.ledger.queries.run_snapshot import read_snapshot
from turnstream_server.ledger.queries.trajectory_history import Trajectory, read_history

router = APIRouter(tags=["reads"])

_LARGEST = 2**31 - 1

GroupName = Annotated[
    str, Path(min_length=1, max_length=512, description="Name of its group.", examples=["task-7"])
]
Sample = Annotated[int, Path(ge=0, le=_LARGEST, description="Its sample, from 0.", examples=[0])]
Attempt = Annotated[int, Query(ge=0, le=_LARGEST, description="Number of its retry.")]


State = Annotated[
    TrajectoryState | None, Query(description="The only state of `states`; all by default.")
]


@router.get("/runs/{run}/ledger", response_model=Ledger, summary="Count trajectories")
async def get_ledger(run: RunName, caller: Read, state: State = None) -> Response:
    """Return the number of trajectories by state and reason, and the bytes that they hold."""

    def read(client: redis.Redis) -> dict[str, Any]:
        facts = ledger_facts(client, open_run(client, run))
        if state is not None:
            facts["states"] = {k: v for k, v in facts["states"].items() if k == state.value}
        return facts

    return await caller.answer(Ledger, read)


@router.get(
    "/runs/{run}/trajectories/{group:path}/{sample}",
    response_model=Trajectory,
    summary="Show a trajectory",
)
async def get_trajectory(
    run: RunName, group: GroupName, sample: Sample, caller: Read, attempt: Attempt = 0
) -> Response:
    """Return state, reason and events of one trajectory, the events in order."""

    def read(client: redis.Redis) -> Trajectory:
        name = f"{group}/{sample}/{attempt}"
        return read_history(client, open_run(client, run), name)

    return await caller.answer(Trajectory, read)


@router.get("/runs/{run}/waits", response_model=Waits, summary="Explain why a run waits")
async def get_waits(run: RunName, caller: Read) -> Response:
    """Return why a run waits, the most important reason first.

    The kinds are those of `turnstream why`; docs/waits.md has an example of each.
    """

    def read(client: redis.Redis) -> dict[str, Any]:
        run_id = open_run(client, run)
        found = reasons(read_snapshot(client, run_id))
        return {"run": run_id, "reasons": [reason._asdict() for reason in found]}

    return await caller.answer(Waits, read)
