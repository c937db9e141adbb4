"""Versions of the weights: read, awaited and announced."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import redis
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from turnstream.store.client import keys
from turnstream.store.client.run_ids import find_run_async
from turnstream.store.run.configs import read_config
from turnstream.store.run.runs import list_versions, newest_version
from turnstream.store.waits.awaited import no_version
from turnstream.store.waits.read_waits import read_waits_async
from turnstream.types import VersionAnnounced
from turnstream.types.names import checked_setting
from turnstream_server.gateway.rest.bodies import Body, SmallBodyRoute
from turnstream_server.gateway.rest.caller import Caller, Known, RunName, Train
from turnstream_server.gateway.rest.held import MAX_WAIT_S, while_connected
from turnstream_server.gateway.rest.problems import Reason, named_reasons
from turnstream_server.ledger.core.frontier import read_frontier_async
from turnstream_server.ledger.sessions.session_writes import TrainerRank
from turnstream_server.ledger.sessions.sessions import announce_version

router = APIRouter(tags=["versions"], route_class=SmallBodyRoute)

_LARGEST: Final = 2**53 - 2
"""The scripts of the store compute with doubles."""

_MAX_URI: Final = 4096

Above = Annotated[int, Query(ge=-1, le=_LARGEST, description="Return versions above this number.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Versions to return, at most.")]
WaitS = Annotated[
    float,
    Query(
        ge=0,
        le=MAX_WAIT_S,
        allow_inf_nan=False,
        description="If there is none, hold the request until one is announced, for at most so "
        "many seconds.",
    ),
]


class Version(BaseModel):
    """Announced weights."""

    model_config = ConfigDict(from_attributes=True)

    version: int = Field(description="Their number, used once.", examples=[3])
    step: int = Field(description="The last step in these weights; 0 before the first.")
    lineage: str = Field(description="History of the run in which they were made.")
    weights_uri: str = Field(
        description="Address for generators: `file://` of a folder, or `http://` and `https://`. "
        "Empty if the weights travel another way.",
        examples=["file:///weights/3"],
    )


class Versions(BaseModel):
    """The newest version, and the versions above a number."""

    newest: Version | None = Field(description="The highest version; null before the first.")
    versions: list[Version] = Field(
        description="The newest first. Empty if none was announced in time."
    )
    reasons: list[Reason] | None = Field(
        default=None, description="Why there is none above the number; absent if there is one."
    )


class NewVersion(Body):
    """Weights that exist from now on."""

    version: StrictInt = Field(
        ge=0, le=_LARGEST, description="Above all versions of the run.", examples=[3]
    )
    weights_uri: StrictStr = Field(
        "", max_length=_MAX_URI, description="Address for generators.", examples=["file:///w/3"]
    )
    step: StrictInt | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="The last step in these weights. Default: the newest stepped one.",
    )
    session_epoch: StrictInt | None = Field(
        None,
        ge=0,
        le=_LARGEST,
        description="Number of the trainer's session; another session is refused. Default: the "
        "present one.",
    )
    session: StrictStr = Field("", max_length=512, description="Name of the trainer's session.")


@router.get(
    "/runs/{run}/versions",
    response_model=Versions,
    response_model_exclude_unset=True,
    summary="List versions of the weights",
)
async def get_versions(
    request: Request,
    run: RunName,
    caller: Known,
    above: Above = -1,
    limit: Limit = 100,
    wait_s: WaitS = 0.0,
) -> Versions:
    """Return the newest version, and all versions above a number.

    With `wait_s` the request is held until there is one. `versions` is empty if none was announced
    in time.
    """
    run_id = await find_run_async(caller.client, run)
    return await while_connected(
        request, _awaited(caller, run_id, above=above, limit=limit, wait_s=wait_s)
    )


@router.post("/runs/{run}/versions", response_model=Version, summary="Announce a version")
async def post_version(run: RunName, new: NewVersion, caller: Train) -> Version:
    """Announce new weights to generators and the planner. A repeat changes nothing."""
    run_id = await find_run_async(caller.client, run)
    frontier = await read_frontier_async(caller.client, run_id)
    announced = VersionAnnounced(
        version=new.version,
        step=frontier.stepped if new.step is None else new.step,
        lineage=frontier.lineage,
        weights_uri=checked_setting(new.weights_uri, field="weights_uri"),
    )
    epoch = frontier.session_epoch if new.session_epoch is None else new.session_epoch
    rank = TrainerRank(epoch, checked_setting(new.session, field="session"))
    await announce_version(caller.client, run_id, rank, announced)
    return Version.model_validate(announced)


async def _awaited(caller: Caller, run: str, *, above: int, limit: int, wait_s: float) -> Versions:
    """Return the versions above a number, once there is one, or after `wait_s`."""

    def read(client: redis.Redis) -> Versions:
        read_config(client, run)  # a deleted run has no versions, too
        newest = newest_version(client, run)
        found = list_versions(client, run, above=above, limit=limit)
        return Versions.model_validate({"newest": newest, "versions": found})

    clock = asyncio.get_running_loop().time
    deadline_s = clock() + wait_s
    # The entry of version v has the id <v + 1>-0.
    known = {keys.run_keys(run).versions: f"{above + 1}-0"}
    while True:
        found = await caller.gateway.threads.run(read)
        left_s = deadline_s - clock()
        if found.versions:
            return found
        if left_s <= 0:
            snapshot = await read_waits_async(caller.client, run)
            found.reasons = named_reasons(no_version(above, snapshot, waited_s=wait_s))
            return found
        await caller.gateway.streams.wait(known, timeout_s=left_s)
