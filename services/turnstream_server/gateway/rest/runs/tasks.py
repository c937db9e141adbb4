"""Prompts and tasks: `/v1/runs/{run}/prompts`, `.../tasks`, `.../refills`.

A task is opened under the writer of the request, and its turns are sent under the same writer. The
gateway renews its leases from the first item that names a trajectory: a task whose response was
lost is handed out again after `lease_s` of the run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from turnstream.errors import NotReadyError
from turnstream.generator.api.work import WorkQueue
from turnstream.generator.encode.group_checks import checked_key, checked_name
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run_async
from turnstream.store.run.configs import read_config_async
from turnstream.store.run.tasks import Prompt, add_prompts
from turnstream.types import TrajectoryKey
from turnstream_server.gateway.rest.bodies import (
    JSON,
    SmallBodyRoute,
    described_body,
    media_type_of,
    parse_body,
    read_content,
)
from turnstream_server.gateway.rest.caller import Admin, Caller, RunName
from turnstream_server.gateway.rest.held import held_calls, while_connected
from turnstream_server.gateway.rest.ingest.delivery import Delivery
from turnstream_server.gateway.rest.ingest.results import UNSUPPORTED
from turnstream_server.gateway.rest.ingest.routes import Call
from turnstream_server.gateway.rest.ingest.stored import is_open_for
from turnstream_server.gateway.rest.ingest.writes import Write
from turnstream_server.gateway.rest.problems import problem_of, response
from turnstream_server.gateway.rest.runs.task_models import (
    PROMPTS_EXAMPLE,
    AddedPrompts,
    EndedTask,
    PromptsBody,
    Refill,
    Task,
    TaskEnd,
    Wait,
)

router = APIRouter(tags=["tasks"], route_class=SmallBodyRoute)

_RETRY_S: Final = 1.0
"""Pause after a request that was held until its end."""

_Taken = TypeVar("_Taken")


@router.post(
    "/runs/{run}/prompts",
    response_model=AddedPrompts,
    summary="Add prompts",
    responses=UNSUPPORTED,
    openapi_extra=described_body(PromptsBody, example=PROMPTS_EXAMPLE),
)
async def post_prompts(request: Request, run: RunName, caller: Admin) -> Response:
    """Add prompts to a run, which generators take as tasks."""
    media_type = media_type_of(request, accepted=(JSON,))
    content = await read_content(request, media_type=media_type)
    first, prompts = await caller.gateway.parsers.run(
        _parse_prompts, content, owner=caller.key.owner, is_json=True
    )

    def add(client: Any) -> dict[str, Any]:
        return {"num_added": add_prompts(client, run, prompts, first=first)}

    return await caller.answer(AddedPrompts, add)


def _parse_prompts(content: bytes) -> tuple[int | None, list[Prompt]]:
    body = parse_body(content, PromptsBody)
    return body.first, body.listed()


@router.post("/runs/{run}/tasks", response_model=Task, summary="Take a task")
async def post_task(request: Request, call: Call, body: Wait | None = None) -> Any:
    """Take the next task: a sample to try again if there is one, else the next prompt.

    The request is held for at most `wait_s`. If there is no task by then, the status is 429, with
    the reasons. If every prompt is done, or the run is closed, it is 409.
    """
    wait_s = 0.0 if body is None else body.wait_s
    run, writer = await find_run_async(call.caller.client, call.run), call.writer_name
    _, config = await read_config_async(call.caller.client, run)
    calls = held_calls(call.caller.gateway, "task", f"run {run!r}: no task", wait_s=wait_s)
    queue = _queue(writer)
    taking = queue.next_task(run, calls, adopt=lambda taken: sorted(taken.epochs))
    found = await _ready(while_connected(request, taking))
    if isinstance(found, Response):
        return found
    task, members = found
    return Task.of(task, members, writer=writer, lease_s=config.lease_s)


@router.post("/runs/{run}/refills", response_model=Refill, summary="Take a refill")
async def post_refill(request: Request, call: Call, body: Wait | None = None) -> Any:
    """Take a sample that is to be tried again, in a group of any generator.

    The request is held for at most `wait_s`. If there is none by then, the status is 429.
    """
    wait_s = 0.0 if body is None else body.wait_s
    run, writer = await find_run_async(call.caller.client, call.run), call.writer_name
    _, config = await read_config_async(call.caller.client, run)
    what = f"run {run!r}: no sample was to be tried again"
    calls = held_calls(call.caller.gateway, "refill", what, wait_s=wait_s)
    found = await _ready(while_connected(request, _queue(writer).next_refill(run, calls)))
    if isinstance(found, Response):
        return found
    group = found.group
    return Refill(
        **found.key._asdict(),
        prompt_uid=group.prompt_uid,
        num_samples=group.num_samples,
        num_needed=group.num_needed,
        writer=writer,
        lease_s=config.lease_s,
    )


@router.post("/runs/{run}/tasks/end", response_model=EndedTask, summary="Leave a task")
async def post_task_end(call: Call, body: TaskEnd) -> Any:
    """Abandon the trajectories of a task that are still open for the writer of the request.

    The others stay as they are. The prompt is handed out again at once if its group has failed.
    """
    named = {TrajectoryKey(body.group_id, each.sample, each.attempt) for each in body.trajectories}
    members = sorted(map(checked_key, named))
    async with call.borrow(members) as (run_writer, slots):
        open_ones = await _open_for(call.caller, run_writer.run, run_writer.writer, members)
        writes = [
            Write(item=item, key=key, abandon_reason=body.reason)
            for item, key in enumerate(open_ones)
        ]
        outcomes = await Delivery(run_writer, call.caller.client, slots).deliver(writes)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return {"abandoned": [{"sample": key.sample, "attempt": key.attempt} for key in open_ones]}


def _queue(writer: str) -> WorkQueue:
    """Return the queue of one request. Other requests, of any gateway, have the same writer."""
    return WorkQueue(checked_name(writer, field="X-Turnstream-Writer"), is_exclusive=True)


async def _ready(taking: Awaitable[_Taken]) -> _Taken | Response:
    """Return what was taken, or the response that says why there was nothing."""
    try:
        return await taking
    except NotReadyError as error:
        return response(problem_of(error).model_copy(update={"retry_after_s": _RETRY_S}))


async def _open_for(
    caller: Caller, run: str, writer: str, members: Sequence[TrajectoryKey]
) -> list[TrajectoryKey]:
    """Return the trajectories that are open, and whose lease this writer has."""
    if not members:
        return []
    ids = map(keys.trajectory_id, members)
    with translating():
        entries: Any = await caller.client.execute_command("HMGET", keys.run_keys(run).ledger, *ids)
    found = zip(members, entries, strict=True)
    return [key for key, entry in found if is_open_for((entry or b"").decode(), writer)]
