"""Models of runs, their ledgers and trajectories, and their reasons for waiting."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, Field, StrictInt, StrictStr

from turnstream.store.run.credits import CreditReason
from turnstream.types import TrajectoryState
from turnstream_server.gateway.rest.bodies import Body
from turnstream_server.gateway.rest.caller import MAX_RUN_LENGTH
from turnstream_server.gateway.rest.problems import Reason
from turnstream_server.ledger.queries.batch_numbers import BatchNumbers
from turnstream_server.ledger.sessions.observers import Observer

RUN_NAME: Final = "Name; of a later run of a name its id, `<name>~2`."


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


class Stop(Body):
    """Why a run is paused or closed."""

    reason: StrictStr = Field(
        "", max_length=1000, description="Shown to programs that wait.", examples=["maintenance"]
    )


class Closing(Stop):
    """How a run is closed."""

    leftover: Literal["short", "carry", "drop"] | None = Field(
        None,
        description="Complete groups that fill no whole batch are trained in a `short` one, kept "
        "for a reopened run (`carry`), or ended (`drop`). Default: `short`.",
    )


class RunState(BaseModel):
    """The state of a run after a change."""

    run: str = Field(description=RUN_NAME, examples=["demo"])
    changed: bool = Field(description="False if it was in this state before.")
    state: str = Field(description="open, paused, closed, or finished.", examples=["paused"])
    planned: int = Field(description="Newest planned step.")
    stepped: int = Field(description="Newest step that the optimizer has taken.")
    committed: int = Field(description="Newest step in a checkpoint.")


class RunLine(BaseModel):
    """State and progress of a run. The numbers are null while it is being deleted."""

    run: str = Field(description=RUN_NAME, examples=["demo"])
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

    run: str = Field(description=RUN_NAME, examples=["demo"])
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

    run: str = Field(description=RUN_NAME, examples=["demo"])
    revision: int = Field(description="Number of the settings, from 1.", examples=[1])
    settings: dict[str, Any] = Field(
        description="All settings, and `format`, the number of the format in which the run is "
        "stored.",
        examples=[{"format": 3, "batch_groups": 8}],
    )


class RunCredit(BaseModel):
    """How many groups may start now; their bytes must also fit into the budget."""

    run: str = Field(description=RUN_NAME, examples=["demo"])
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


class Waits(BaseModel):
    """Why a run waits, the most important reason first."""

    run: str
    reasons: list[Reason]
