"""Reasons for waiting: `GET /v1/runs/{run}/waits`, as `turnstream why`."""

from __future__ import annotations

from typing import Any

import redis
from fastapi import APIRouter
from fastapi.responses import Response

from turnstream.store.run.configs import open_run
from turnstream.store.waits.wait_reasons import reasons
from turnstream_server.bus.queries.run_snapshot import read_snapshot
from turnstream_server.gateway.rest.access import Read, RunName
from turnstream_server.gateway.rest.answers import answer
from turnstream_server.gateway.rest.runs.models import Waits

router = APIRouter(tags=["reads"])


@router.get("/runs/{run}/waits", response_model=Waits, summary="Explain why a run waits")
async def get_waits(run: RunName, caller: Read) -> Response:
    """Return why a run waits, the most important reason first.

    The kinds are those of `turnstream why`; docs/waits.md has an example of each.
    """

    def read(client: redis.Redis) -> dict[str, Any]:
        run_id = open_run(client, run)
        found = reasons(read_snapshot(client, run_id))
        return {"run": run_id, "reasons": [reason._asdict() for reason in found]}

    return await answer(caller, Waits, read)
