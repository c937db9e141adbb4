"""Runs: `/v1/runs`. Each call is the one behind `turnstream run`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Annotated, Any, Final

import redis
from fastapi import APIRouter, Query
from fastapi.responses import Response

from turnstream.batching.config.from_settings import config_from_settings, with_settings
from turnstream.batching.config.rules import changed_settings
from turnstream.records.configs import encode_config
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run
from turnstream.store.run import runs
from turnstream.store.run.configs import open_run, read_config, read_revisions, revise_config
from turnstream.store.run.credits import credit
from turnstream.types.names import RunId, checked_run_name
from turnstream_server.gateway.rest.bodies import SmallBodyRoute
from turnstream_server.gateway.rest.caller import (
    MAX_RUN_LENGTH,
    Admin,
    Caller,
    Known,
    Read,
    RunName,
)
from turnstream_server.gateway.rest.runs.models import (
    Closing,
    Deleted,
    NewRun,
    Revised,
    Revision,
    Run,
    RunConfig,
    RunCredit,
    RunLine,
    RunList,
    RunState,
    Stop,
)
from turnstream_server.keys.records import ApiKey
from turnstream_server.ledger.admin.deletion import delete_run
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.queries.run_facts import progress_facts, run_facts, run_line

router = APIRouter(tags=["runs"], route_class=SmallBodyRoute)

_MAX_PAGE: Final = 1_000
"""Runs of one response: each takes half a millisecond."""

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
async def post_pause(run: RunName, caller: Admin, body: Stop | None = None) -> Response:
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
