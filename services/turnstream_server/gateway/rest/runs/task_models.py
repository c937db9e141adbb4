"""Models of prompts and tasks."""

from __future__ import annotations

import base64
import binascii

from pydantic import BaseModel, Field, StrictInt, StrictStr

from turnstream.errors import InvalidTurnError
from turnstream.store.run.tasks import OfferedTask, Prompt
from turnstream.types import TrajectoryKey
from turnstream_server.gateway.rest.bodies import MAX_ITEMS, Body
from turnstream_server.gateway.rest.held import WaitSeconds
from turnstream_server.gateway.rest.ingest.writes import named_fields


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
            payload=_encoded(self.text) if self.text is not None else _decoded(self.payload or ""),
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


PROMPTS_EXAMPLE = {
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


class Task(BaseModel):
    """A prompt to sample, or one sample of it to try again. Its trajectories are open."""

    group_id: str = Field(examples=["task-7#1"])
    prompt_uid: str = Field(examples=["task-7"])
    text: str | None = Field(
        description="The input of the prompt; null if it is no UTF-8.",
        examples=["What is 6 times 7?"],
    )
    payload: str = Field(
        description="The same bytes in base64.", examples=["V2hhdCBpcyA2IHRpbWVzIDc/"]
    )
    num_samples: int = Field(examples=[2])
    num_needed: int = Field(description="Members that complete the group.", examples=[2])
    trajectories: list[Member] = Field(
        description="All samples of a new group, one of a refill.",
        examples=[[{"sample": 0, "attempt": 0}, {"sample": 1, "attempt": 0}]],
    )
    writer: str = Field(
        description="Writer of the request. Turns need the same X-Turnstream-Writer.",
        examples=["generator-7"],
    )
    lease_s: float = Field(
        description="Seconds within which a trajectory needs its first turn, or a renewal: an item "
        "of `/turns` with its name alone.",
        examples=[60.0],
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


class Refill(BaseModel):
    """A sample to try again. Its trajectory is open."""

    group_id: str = Field(examples=["task-7#1"])
    sample: int = Field(examples=[1])
    attempt: int = Field(examples=[1])
    prompt_uid: str
    num_samples: int
    num_needed: int
    writer: str = Field(examples=["generator-7"])
    lease_s: float = Field(examples=[60.0])


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


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidTurnError("text", "it is no valid Unicode") from error


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
