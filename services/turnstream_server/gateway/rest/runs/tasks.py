"""Prompts and tasks: `/v1/runs/{run}/prompts`, `.../tasks`, `.../refills`.

A task is opened under the writer of the request, and its turns are sent under the same writer. The
gateway renews its leases from the first item that names a trajectory: a task whose response was
lost is handed out again after `lease_s` of the run.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable
from typing import Any, Final, NamedTuple, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, StrictInt, StrictStr

from turnstream.errors import InvalidTurnError, NotReadyError
from turnstream.generator.api.work import WorkQueue
from turnstream.generator.encode.group_checks import checked_key, checked_name
from turnstream.generator.transport.transport import BoundedCalls
from turnstream.store.client.run_ids import find_run_async
from turnstream.store.run.configs import read_config_async
from turnstream.store.run.tasks import OfferedTask, Prompt, add_prompts
from turnstream.types import TrajectoryKey
from turnstream_server.gateway.rest.bodies import (
    MAX_ITEMS,
    Body,
    SmallBodyRoute,
    described_body,
    parse_body,
    parsed_json,
)
from turnstream_server.gateway.rest.caller import Admin, RunName
from turnstream_server.gateway.rest.held import WaitSeconds, held_calls, while_connected
from turnstream_server.gateway.rest.ingest.results import UNSUPPORTED
from turnstream_server.gateway.rest.ingest.routes import Call, IngestCall
from turnstream_server.gateway.rest.ingest.writes import Write, named_fields
from turnstream_server.gateway.rest.problems import problem_of, response

router = APIRouter(tags=["tasks"], route_class=SmallBodyRoute)

_RETRY_S: Final = 1.0
"""Pause after a request that was held until its end."""

_Taken = TypeVar("_Taken")


class PromptFields(Body):
    """A prompt that generators sample, with its input as text or as bytes."""

    prompt_uid: StrictStr = Field(description="Its name in the data set.")
    text: StrictStr | None = Field(None, description="The input, as text.")
    payload: StrictStr | None = Field(None, description="The input in base64, in place of `text`.")
    num_samples: StrictInt = Field(ge=1, description="Trajectories of its group.")
    num_needed: StrictInt = Field(
        0, ge=0, description="Number of them that complete the group; 0 for all."
    )

    def prompt(self) -> Prompt:
        """Return the prompt; InvalidTurnError names a wrong field."""
        if (self.text is None) == (self.payload is None):
            raise InvalidTurnError("payload", "exactly one of text and payload is needed")
        return Prompt(
            prompt_uid=self.prompt_uid,
            payload=_decoded(self.payload or "") if self.text is None else self.text.encode(),
            num_samples=self.num_samples,
            num_needed=self.num_needed,
        )


class PromptsBody(Body):
    """Prompts to add, in the order in which they are handed out."""

    first: StrictInt | None = Field(
        None,
        ge=1,
        description="Number of the first of these prompts in the run, from 1. A repeated request "
        "with the same number adds nothing twice. Null appends them.",
    )
    prompts: list[PromptFields] = Field(
        max_length=MAX_ITEMS, description="Without any, the request returns the number alone."
    )

    def listed(self) -> list[Prompt]:
        """Return the prompts; InvalidTurnError names the place of a wrong field."""
        found: list[Prompt] = []
        for number, each in enumerate(self.prompts):
            with named_fields("prompts", number):
                found.append(each.prompt())
        return found


_PROMPTS: Final = {
    "first": 1,
    "prompts": [{"prompt_uid": "task-7", "text": "What is 6 times 7?", "num_samples": 2}],
}


class AddedPrompts(BaseModel):
    """The prompts of a run after an addition."""

    num_added: int = Field(description="Prompts that were ever added to the run.", examples=[1])


class Wait(Body):
    """How long a request may be held."""

    wait_s: WaitSeconds = 0.0


class Member(Body):
    """A trajectory of a task."""

    sample: StrictInt = Field(ge=0, examples=[0])
    attempt: StrictInt = Field(0, ge=0, examples=[0])


class _Offer(BaseModel):
    group_id: str = Field(examples=["task-7#1"])
    prompt_uid: str = Field(examples=["task-7"])
    num_samples: int = Field(examples=[2])
    num_needed: int = Field(description="Members that complete the group.", examples=[2])
    writer: str = Field(
        description="Writer of the request. Turns need the same X-Turnstream-Writer.",
        examples=["generator-7"],
    )
    lease_s: float = Field(
        description="Seconds within which a trajectory needs its first turn, or a renewal: an item "
        "of `/turns` with its name alone.",
        examples=[60.0],
    )


class Task(_Offer):
    """A prompt to sample, or one sample of it to try again. Its trajectories are open."""

    text: str | None = Field(
        description="The input of the prompt; null if it is no UTF-8.",
        examples=["What is 6 times 7?"],
    )
    payload: str = Field(
        description="The same bytes in base64.", examples=["V2hhdCBpcyA2IHRpbWVzIDc/"]
    )
    trajectories: list[Member] = Field(
        description="All samples of a new group, one of a refill.",
        examples=[[{"sample": 0, "attempt": 0}, {"sample": 1, "attempt": 0}]],
    )

    @classmethod
    def of(
        cls, task: OfferedTask, members: list[TrajectoryKey], *, writer: str, lease_s: float
    ) -> Task:
        """Return a task whose trajectories this writer holds."""
        return cls(
            group_id=task.group.group_id,
            prompt_uid=task.group.prompt_uid,
            text=_text(task.payload),
            payload=base64.b64encode(task.payload).decode(),
            num_samples=task.group.num_samples,
            num_needed=task.group.num_needed,
            trajectories=[Member(sample=key.sample, attempt=key.attempt) for key in members],
            writer=writer,
            lease_s=lease_s,
        )


class Refill(_Offer):
    """A sample to try again. Its trajectory is open."""

    sample: int = Field(examples=[1])
    attempt: int = Field(examples=[1])


class TaskEnd(Body):
    """A task that is left."""

    group_id: StrictStr = Field(examples=["task-7#1"])
    trajectories: list[Member] = Field(
        max_length=MAX_ITEMS, description="The trajectories of the task."
    )
    reason: StrictStr = Field(
        "the task was left",
        max_length=1000,
        description="For the ledger; its first 200 characters are kept.",
    )


class EndedTask(BaseModel):
    """The trajectories that were open for this writer, and are abandoned."""

    abandoned: list[Member]


@router.post(
    "/runs/{run}/prompts",
    response_model=AddedPrompts,
    summary="Add prompts",
    responses=UNSUPPORTED,
    openapi_extra=described_body(PromptsBody, example=_PROMPTS),
)
async def post_prompts(request: Request, run: RunName, caller: Admin) -> Response:
    """Add prompts to a run, which generators take as tasks."""
    first, prompts = await parsed_json(request, _parse_prompts, owner=caller.key.owner)

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
    taking = await _begin(call, body, awaited="task", what="no task")
    next_ = taking.queue.next_task(taking.run, taking.calls, adopt=lambda new: sorted(new.epochs))
    found = await _ready(while_connected(request, next_))
    if isinstance(found, Response):
        return found
    task, members = found
    return Task.of(task, members, writer=call.writer_name, lease_s=taking.lease_s)


@router.post("/runs/{run}/refills", response_model=Refill, summary="Take a refill")
async def post_refill(request: Request, call: Call, body: Wait | None = None) -> Any:
    """Take a sample that is to be tried again, in a group of any generator.

    The request is held for at most `wait_s`. If there is none by then, the status is 429.
    """
    what = "no sample was to be tried again"
    taking = await _begin(call, body, awaited="refill", what=what)
    next_ = taking.queue.next_refill(taking.run, taking.calls)
    found = await _ready(while_connected(request, next_))
    if isinstance(found, Response):
        return found
    group = found.group
    return Refill(
        **found.key._asdict(),
        prompt_uid=group.prompt_uid,
        num_samples=group.num_samples,
        num_needed=group.num_needed,
        writer=call.writer_name,
        lease_s=taking.lease_s,
    )


@router.post("/runs/{run}/tasks/end", response_model=EndedTask, summary="Leave a task")
async def post_task_end(call: Call, body: TaskEnd) -> Any:
    """Abandon the trajectories of a task that are still open for the writer of the request.

    The others stay as they are. The prompt is handed out again at once if its group has failed.
    """
    named = {TrajectoryKey(body.group_id, each.sample, each.attempt) for each in body.trajectories}
    members = sorted(map(checked_key, named))
    async with call.delivery(members) as delivery:
        open_ones = await delivery.open_of_writer(members)
        writes = [
            Write(item=item, key=key, abandon_reason=body.reason)
            for item, key in enumerate(open_ones)
        ]
        outcomes = await delivery.deliver(writes)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return {"abandoned": [{"sample": key.sample, "attempt": key.attempt} for key in open_ones]}


class _Taking(NamedTuple):
    run: str
    lease_s: float
    queue: WorkQueue
    calls: BoundedCalls


async def _begin(call: IngestCall, body: Wait | None, *, awaited: str, what: str) -> _Taking:
    """Return the calls of one request. Other requests, of any gateway, have the same writer."""
    run = await find_run_async(call.caller.client, call.run)
    _, config = await read_config_async(call.caller.client, run)
    wait_s = 0.0 if body is None else body.wait_s
    calls = held_calls(call.caller.gateway, awaited, f"run {run!r}: {what}", wait_s=wait_s)
    writer = checked_name(call.writer_name, field="X-Turnstream-Writer")
    return _Taking(run, config.lease_s, WorkQueue(writer, is_exclusive=True), calls)


async def _ready(taking: Awaitable[_Taken]) -> _Taken | Response:
    """Return what was taken, or the response that says why there was nothing."""
    try:
        return await taking
    except NotReadyError as error:
        return response(problem_of(error).model_copy(update={"retry_after_s": _RETRY_S}))


def _decoded(payload: str) -> bytes:
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidTurnError("payload", f"it is no base64: {error}") from error


def _text(payload: bytes) -> str | None:
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return None
