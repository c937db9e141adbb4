"""Reads of a run: its ledger, a trajectory, its reasons for waiting, and its batches."""

from __future__ import annotations

from typing import Annotated, Any, Final

import redis
from fastapi import APIRouter, Path, Query
from fastapi.responses import Response
from pydantic import BaseModel, Field

from turnstream.errors import (
    InvalidConfigError,
    NotReadyError,
    RunNotFoundError,
    UnavailableError,
)
from turnstream.store.run.configs import open_run
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import TrajectoryState
from turnstream_server.gateway.rest.bodies import ARROW
from turnstream_server.gateway.rest.caller import Read, RunName
from turnstream_server.ledger.queries.ledger import ledger_facts
from turnstream_server.ledger.queries.run_facts import BatchNumbers, batch_facts, page_of_batches
from turnstream_server.ledger.queries.run_snapshot import read_snapshot
from turnstream_server.ledger.queries.trajectory_history import Trajectory, read_history

router = APIRouter(tags=["reads"])

_LARGEST: Final = 2**31 - 1
_MAX_DP_WORLD_SIZE: Final = 8192
_MAX_PAGE: Final = 100

Step = Annotated[int, Path(ge=1, le=_LARGEST, description="Number of the batch.", examples=[1])]
Index = Annotated[int, Path(ge=0, le=_LARGEST, description="Mini-batch, from 0.", examples=[0])]
FromStep = Annotated[int, Query(ge=1, le=_LARGEST, description="First step of the page.")]
Limit = Annotated[int, Query(ge=1, le=_MAX_PAGE, description="Batches of the page, at most.")]
DpRank = Annotated[int, Query(ge=0, lt=_MAX_DP_WORLD_SIZE, description="Data-parallel rank.")]
DpWorldSize = Annotated[int, Query(ge=1, le=_MAX_DP_WORLD_SIZE, description="Number of ranks.")]
GroupName = Annotated[
    str, Path(min_length=1, max_length=512, description="Name of its group.", examples=["task-7"])
]
Sample = Annotated[int, Path(ge=0, le=_LARGEST, description="Its sample, from 0.", examples=[0])]
Attempt = Annotated[int, Query(ge=0, le=_LARGEST, description="Number of its retry.")]
State = Annotated[
    TrajectoryState | None, Query(description="The only state of `states`; all by default.")
]

_BYTES: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The share of the rank, the very bytes that a batcher sends.",
        "content": {ARROW: {"schema": {"type": "string", "format": "binary"}}},
        "headers": {
            "ETag": {
                "description": "SHA-256 over columns and metadata.",
                "schema": {"type": "string"},
            }
        },
    }
}


class StateFacts(BaseModel):
    """The trajectories of one state."""

    count: int
    reasons: dict[str, int] = Field(description="Number of trajectories by reason.")
    held_bytes: int = Field(description="Bytes of their payload in the store.")


class Prompts(BaseModel):
    """Numbers of the prompts that were added to the run."""

    added: int
    left: int
    given: int
    trained: int
    filtered: int


class Ledger(BaseModel):
    """Where the trajectories of a run are. Without a query, the counts add up to `accepted`."""

    run: str
    accepted: int
    conflicts: int = Field(description="Writes that were refused because of another content.")
    last_conflict: str
    late_rewards: int
    planned: int
    stepped: int
    committed: int
    lineage: str
    rollbacks: list[dict[str, Any]]
    origin: dict[str, Any] | None
    states: dict[TrajectoryState, StateFacts] = Field(
        description="Only states that occur, or the state of the query."
    )
    prompts: Prompts
    budget: dict[str, Any] = Field(description="Bytes of the run, and their limits.")
    full: str | None = Field(description="Why the run takes no more bytes; null if it does.")


class Why(BaseModel):
    """A reason why a run waits."""

    kind: str = Field(examples=["too_few_ready"])
    sentence: str = Field(examples=["step 1 waits for 95 s: 1 of 2 groups ready, 1 open"])
    facts: dict[str, str | int | float | None] = Field(description="Values of the sentence.")


class Waits(BaseModel):
    """Why a run waits, the most important reason first."""

    run: str
    reasons: list[Why]


class BatchLine(BaseModel):
    """A planned batch, without its trajectories."""

    run: str
    step: int = Field(examples=[3])
    state: str = Field(description="planned, stepped or committed.", examples=["stepped"])
    revision: int = Field(description="Above 0 if it was planned again because of damage.")
    manifest_hash: str = Field(description="Its name in the chain of batches.")
    previous_hash: str
    lineage: str
    config_revision: int = Field(description="Number of the settings that it was planned with.")
    numbers: BatchNumbers
    num_mini_batches: int


class BatchList(BaseModel):
    """Batches that are stored, in order."""

    batches: list[BatchLine]
    next_step: int | None = Field(
        description="`from_step` of the next page; null if there is no further batch."
    )


class PlannedTrajectory(BaseModel):
    """A trajectory of a mini-batch."""

    id: str = Field(examples=["task-7/0/0"])
    prompt_uid: str
    status: str
    reward: float
    advantage: float
    turn_advantages: list[float]
    weights: list[float] = Field(description="Weight of each row in the loss.")
    num_rows: int


class MiniBatch(BaseModel):
    """The rows of one optimizer update."""

    denominators: dict[str, float] = Field(description="Divisors of the sums of a loss.")
    num_rows: int
    first_row_id: int
    trajectories: list[PlannedTrajectory]


class PastTrajectory(BaseModel):
    """A trajectory of a released batch."""

    id: str
    crc: str = Field(description="Checksum of its payload.")


class Batch(BaseModel):
    """A batch with its mini-batches. A released one has names and checksums alone."""

    run: str
    step: int
    state: str = Field(examples=["stepped"])
    manifest_hash: str
    lineage: str
    mean_reward: float | None = Field(None, description="Of a released batch.")
    revision: int | None = None
    previous_hash: str | None = None
    config_revision: int | None = None
    numbers: BatchNumbers | None = None
    figures: dict[str, Any] | None = Field(None, description="Statistics of tags and metrics.")
    mini_batches: list[MiniBatch] = Field(description="Empty if the batch is released.")
    trajectories: list[PastTrajectory] | None = Field(None, description="Only of a released batch.")


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


@router.get("/runs/{run}/batches", response_model=BatchList, summary="List batches")
async def get_batches(
    run: RunName, caller: Read, from_step: FromStep = 1, limit: Limit = 20
) -> Response:
    """Return planned and stepped batches with their numbers, in order.

    A batch is listed until it is released. A page of large batches has fewer than `limit`.
    """

    def read(client: redis.Redis) -> dict[str, Any]:
        run_id = open_run(client, run)
        page, next_step = page_of_batches(client, run_id, from_step=from_step, limit=limit)
        return {"batches": page, "next_step": next_step}

    return await caller.answer(BatchList, read)


@router.get("/runs/{run}/batches/{step}", response_model=Batch, summary="Show a batch")
async def get_batch(run: RunName, step: Step, caller: Read) -> Response:
    """Return the mini-batches of a step: trajectories, rewards, advantages and denominators.

    A released batch has the names and checksums of its trajectories.
    """

    def read(client: redis.Redis) -> dict[str, Any]:
        try:
            return batch_facts(client, open_run(client, run), step)
        except NotReadyError as error:
            raise RunNotFoundError(str(error)) from error

    return await caller.answer(Batch, read)


@router.get(
    "/runs/{run}/batches/{step}/{index}",
    response_class=Response,
    responses=_BYTES,
    summary="Get a mini-batch",
)
async def get_mini_batch(
    run: RunName,
    step: Step,
    index: Index,
    caller: Read,
    dp_rank: DpRank = 0,
    dp_world_size: DpWorldSize = 1,
) -> Response:
    """Return one rank's share of a mini-batch as an Arrow IPC stream.

    The same request has the same bytes until the step is released; then the status is 410.
    """
    if dp_rank >= dp_world_size:
        raise InvalidConfigError("dp_rank", f"{dp_rank} is not below {dp_world_size}")
    read_share = caller.gateway.options.read_share
    if read_share is None:
        raise UnavailableError("this gateway assembles no batches")

    def read() -> Any:
        try:
            return read_share(
                run, step, mini_batch=index, dp_rank=dp_rank, dp_world_size=dp_world_size
            )
        except NotReadyError as error:
            raise RunNotFoundError(str(error)) from error

    share = await caller.gateway.threads.run_heavy(read, owner=caller.key.owner)
    headers = {"ETag": f'"{share.content_hash}"'}
    return Response(share.data, media_type=ARROW, headers=headers)
