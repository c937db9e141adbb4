"""Runs: `/v1/runs`. Each call is the one behind `turnstream run`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import redis
from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import BaseModel, Field, StrictInt, StrictStr

from turnstream.batching.config.from_settings import config_from_settings, with_settings
from turnstream.batching.config.rules import changed_settings
from turnstream.records.configs import encode_config
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run
from turnstream.store.run import runs
from turnstream.store.run.configs import open_run, read_config, read_revisions, revise_config
from turnstream.store.run.credits import CreditReason, credit
from turnstream.types.names import RunId, checked_run_name
from turnstream_server.gateway.rest.bodies import Body, SmallBodyRoute
from turnstream_server.gateway.rest.caller import (
    MAX_RUN_LENGTH,
    Admin,
    Caller,
    Known,
    Read,
    RunName,
)
from turnstream_server.keys.records import ApiKey
from turnstream_server.ledger.admin.deletion import delete_run
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.queries.run_facts import (
    BatchNumbers,
    progress_facts,
    run_facts,
    run_line,
)
from turnstream_server.ledger.sessions.observers import Observer

router = APIRouter(tags=["runs"], route_class=SmallBodyRoute)

_MAX_PAGE: Final = 1_000
"""Runs of one response: each takes half a millisecond."""

_RUN_NAME: Final = "Name; of a later run of a name its id, `<name>~2`."


class NewRun(Body):
    """A run to create."""

    name: StrictStr = Field(
        min_length=1,
        max_length=MAX_RUN_LENGTH,
        description="Any text but `.` and `..`, and without `~` and digits at its end.",
        examples=["demo"],
    )
    settings: dict[str, Any] = Field(
        description="The fields of `BatchingConfig`. Needed is `batch_groups`, the groups of one "
        "step; the others have defaults.",
        examples=[{"batch_groups": 8, "max_staleness": 1}],
    )


class Revision(Body):
    """Settings that change from a step on."""

    from_step: StrictInt = Field(
        ge=1, le=2**31 - 1, description="A step that is not planned yet.", examples=[5]
    )
    settings: dict[str, Any] = Field(
        description="The settings that change.", examples=[{"batch_groups": 16}]
    )


class Reason(Body):
    """Why the state of a run is changed."""

    reason: StrictStr = Field(
        "", max_length=1000, description="Shown to programs that wait.", examples=["maintenance"]
    )


class Closing(Reason):
    """How a run is closed."""

    leftover: Literal["short", "carry", "drop"] | None = Field(
        None,
        description="Complete groups that fill no whole batch are trained in a `short` one, kept "
        "for a reopened run (`carry`), or ended (`drop`). Default: `short`.",
    )


class RunState(BaseModel):
    """The state of a run after a change."""

    run: str = Field(description=_RUN_NAME, examples=["demo"])
    changed: bool = Field(description="False if it was in this state before.")
    state: str = Field(description="open, paused, closed, or finished.", examples=["paused"])
    planned: int = Field(description="Newest planned step.")
    stepped: int = Field(description="Newest step that the optimizer has taken.")
    committed: int = Field(description="Newest step in a checkpoint.")


class RunLine(BaseModel):
    """State and progress of a run. The numbers are null while it is being deleted."""

    run: str = Field(description=_RUN_NAME, examples=["demo"])
    state: str = Field(examples=["open"])
    planned: int | None = None
    stepped: int | None = None
    committed: int | None = None
    accepted: int | None = Field(None, description="Trajectories that were ever opened.")
    trained: int | None = Field(None, description="Trajectories in stepped batches.")
    origin: str | None = Field(None, description="Where a forked run begins.")


class RunList(BaseModel):
    """Runs that the key may use, sorted."""

    runs: list[RunLine]
    next_run: str | None = Field(
        description="`from_run` of the next page; null if there is no further run."
    )


class Steps(BaseModel):
    """Newest step of each kind; 0 before the first."""

    planned: int
    stepped: int
    committed: int


class Run(BaseModel):
    """A run: its state, its progress and its settings."""

    run: str = Field(description=_RUN_NAME, examples=["demo"])
    state: str = Field(examples=["open"])
    steps: Steps
    groups_opened: int
    policy_version: int | None
    newest_batch: BatchNumbers | None
    session_epoch: int = Field(description="Number of the trainer session; 0 before the first.")
    dp_world_size: int
    planner: str | None = Field(description="The batcher that plans the run.")
    lineage: str
    rollbacks: list[dict[str, Any]]
    origin: dict[str, Any] | None
    paused: str | None = Field(description="Reason of the pause; null if the run is not paused.")
    observers: list[Observer]
    revision: int = Field(description="Number of the settings in force.")
    pending_revisions: dict[str, str]
    settings: dict[str, Any]
    changed_settings: list[str] = Field(description="Settings that differ from their default.")


class SettingChange(BaseModel):
    """A setting with its old and its new value."""

    name: str = Field(examples=["batch_groups"])
    before: Any = Field(examples=[8])
    after: Any = Field(examples=[16])


class RunConfig(BaseModel):
    """The settings in force."""

    run: str = Field(description=_RUN_NAME, examples=["demo"])
    revision: int = Field(description="Number of the settings, from 1.", examples=[1])
    settings: dict[str, Any] = Field(
        description="All settings, and `format`, the number of the format in which the run is "
        "stored.",
        examples=[{"format": 3, "batch_groups": 8}],
    )


class RunCredit(BaseModel):
    """How many groups may start now; their bytes must also fit into the budget."""

    run: str = Field(description=_RUN_NAME, examples=["demo"])
    num_groups: int = Field(examples=[8])
    most: int = Field(description="Groups that may be live after the last step.", examples=[16])
    reason: CreditReason | None = Field(description="Null while a group may start.")
    sentence: str = Field(examples=["8 groups may start: 8 of 16 are live after step 3"])


class Revised(BaseModel):
    """A revision of the settings."""

    run: str
    revision: int
    from_step: int
    changes: list[SettingChange] = Field(description="Empty if nothing changes.")


class Deleted(BaseModel):
    """A finished deletion."""

    deleted: list[str] = Field(description="Ids of the deleted runs, the oldest first.")
    num_trajectories: int


_CREATED: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "A run of this name with the same settings exists."},
    201: {"description": "The run was created.", "model": Run},
}


@router.post(
    "/runs", response_model=Run, status_code=201, summary="Create a run", responses=_CREATED
)
async def post_run(new: NewRun, caller: Admin) -> Response:
    """Create a run, or return the run of this name if it has the same settings.

    With other settings the status is 409.
    """
    caller.key.require("admin", run=checked_run_name(new.name))
    config = config_from_settings(new.settings)

    def create(client: redis.Redis) -> bool:
        with translating():
            found = client.exists(keys.run_keys(find_run(client, new.name)).frontier)
        runs.create_run(client, new.name, config)
        return not found

    is_new = await caller.gateway.threads.run(create)
    status = 201 if is_new else 200
    return await caller.answer(Run, lambda client: run_facts(client, new.name), status=status)


FromRun = Annotated[
    str, Query(max_length=MAX_RUN_LENGTH + 16, description="First run of the page, in order.")
]
Limit = Annotated[int, Query(ge=1, le=_MAX_PAGE, description="Runs of the page, at most.")]


@router.get("/runs", response_model=RunList, summary="List runs")
async def get_runs(caller: Known, from_run: FromRun = "", limit: Limit = _MAX_PAGE) -> Response:
    """Return state and progress of the runs that the key may use, sorted."""

    def read(client: redis.Redis) -> dict[str, Any]:
        allowed = [each for each in _runs_of(client, caller.key) if each >= from_run]
        lines = [RunLine.model_validate(run_line(client, run)) for run in allowed[:limit]]
        return {"runs": lines, "next_run": next(iter(allowed[limit:]), None)}

    return await caller.answer(RunList, read)


@router.get("/runs/{run}", response_model=Run, summary="Show a run")
async def get_run(run: RunName, caller: Read) -> Response:
    """Return state, progress, newest batch, observers and settings of a run."""
    return await caller.answer(Run, lambda client: run_facts(client, run))


@router.get("/runs/{run}/config", response_model=RunConfig, summary="Show the settings")
async def get_config(run: RunName, caller: Known) -> Response:
    """Return the id of a run, and its settings in force. A key of any role may read them."""

    def read(client: redis.Redis) -> dict[str, Any]:
        run_id = find_run(client, run)
        revision, config = read_config(client, run_id)
        settings = json.loads(encode_config(config))
        return {"run": run_id, "revision": revision, "settings": settings}

    return await caller.answer(RunConfig, read)


@router.get("/runs/{run}/credit", response_model=RunCredit, summary="Show the credit")
async def get_credit(run: RunName, caller: Known) -> Response:
    """Return how many groups may start now, and why none may. A key of any role may read it."""

    def read(client: redis.Redis) -> dict[str, Any]:
        run_id = find_run(client, run)
        return {"run": run_id, **dataclasses.asdict(credit(client, run_id))}

    return await caller.answer(RunCredit, read)


@router.patch("/runs/{run}/config", response_model=Revised, summary="Revise the settings")
async def patch_config(run: RunName, revision: Revision, caller: Admin) -> Response:
    """Change settings from a step on that is not planned yet. An equal revision changes nothing."""
    return await caller.answer(Revised, lambda client: _revise(client, run, revision))


@router.post("/runs/{run}/pause", response_model=RunState, summary="Pause a run")
async def post_pause(run: RunName, caller: Admin, body: Reason | None = None) -> Response:
    """Admit no new group and plan no batch; open groups and planned batches continue."""
    reason = "" if body is None else body.reason
    return await _changed(caller, run, lambda client, run: runs.pause_run(client, run, reason))


@router.post("/runs/{run}/resume", response_model=RunState, summary="Resume a run")
async def post_resume(run: RunName, caller: Admin) -> Response:
    """End a pause."""
    return await _changed(caller, run, runs.resume_run)


@router.post("/runs/{run}/close", response_model=RunState, summary="Close a run")
async def post_close(run: RunName, caller: Admin, body: Closing | None = None) -> Response:
    """Admit no new group. The run ends when its open groups are decided."""
    closing = body or Closing.model_construct(reason="", leftover=None)

    def close(client: redis.Redis, run: str) -> bool:
        return runs.close_run(client, run, closing.reason, leftover=closing.leftover)

    return await _changed(caller, run, close)


@router.post("/runs/{run}/reopen", response_model=RunState, summary="Reopen a run")
async def post_reopen(run: RunName, caller: Admin) -> Response:
    """Admit groups to a closed run again."""
    return await _changed(caller, run, runs.reopen_run)


@router.delete("/runs/{run}", response_model=Deleted, summary="Delete a run")
async def remove_run(run: RunName, caller: Admin) -> Response:
    """Delete everything that the store has of a run.

    The same call again continues a deletion that was interrupted.
    """

    def delete(client: redis.Redis) -> dict[str, Any]:
        done = delete_run(client, run)
        return {"deleted": [*done.runs], "num_trajectories": done.num_trajectories}

    return await caller.answer(Deleted, delete)


def _runs_of(client: redis.Redis, key: ApiKey) -> list[RunId]:
    return [run for run in runs.list_runs(client) if not key.runs or run.name in key.runs]


def _revise(client: redis.Redis, run: str, revision: Revision) -> dict[str, Any]:
    run = open_run(client, run)
    before = read_revisions(client, run).last.config
    after = with_settings(before, revision.settings)
    number = revise_config(client, run, after, from_step=revision.from_step)
    changes = [change._asdict() for change in changed_settings(before, after)]
    return {"run": run, "revision": number, "from_step": revision.from_step, "changes": changes}


async def _changed(
    caller: Caller, run: str, change: Callable[[redis.Redis, str], bool]
) -> Response:
    def changed(client: redis.Redis) -> dict[str, Any]:
        run_id = open_run(client, run)
        is_changed = change(client, run_id)
        facts = progress_facts(read_frontier(client, run_id))
        return {"run": run_id, "changed": is_changed, **facts}

    return await caller.answer(RunState, changed)
