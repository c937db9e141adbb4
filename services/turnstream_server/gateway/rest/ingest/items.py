"""JSON bodies of the ingest routes, and the writes that they ask for.

The field of an error begins with the place of the item: `items.3.logprobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import (
    FailFast,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from turnstream.errors import InvalidTurnError
from turnstream.generator.encode.group_checks import checked_key, checked_opening, require_turns
from turnstream.types import GroupOpened, Purpose, Status, TrajectoryKey
from turnstream.types.names import shown
from turnstream_server.gateway.rest.bodies import MAX_TURNS, MAX_WRITES
from turnstream_server.gateway.rest.ingest.turn_models import (
    AbandonFields,
    Logprobs,
    LossMask,
    Part,
    PromptIds,
    ResponseIds,
    Rewards,
    SealFields,
    TurnFields,
    VersionRuns,
    Weights,
)
from turnstream_server.gateway.rest.ingest.writes import (
    Opening,
    Write,
    WrittenTurn,
    check_num_members,
    named_fields,
    opening_of,
)


class _Member(Part):
    """The trajectory that an item is for."""

    group_id: StrictStr = Field(description="The same for all samples that are compared.")
    sample: StrictInt = Field(ge=0, description="From 0 to num_samples - 1.")
    attempt: StrictInt = Field(0, ge=0, description="Number of the retry of an abandoned sample.")

    @property
    def key(self) -> TrajectoryKey:
        """Return the key of the trajectory."""
        return TrajectoryKey(self.group_id, self.sample, self.attempt)


_NumNeeded = Annotated[
    StrictInt | None,
    Field(description="Members that decide the group, the first that are sealed; null for all."),
]
_PromptUid = Annotated[StrictStr, Field(description="The dataset's own name of the prompt.")]
_Purpose = Annotated[
    StrictStr,
    Field(
        description="An eval group is never trained.",
        json_schema_extra={"enum": [each.value for each in Purpose]},
    ),
]


_Samples = Annotated[
    Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})
]


class GroupFields(Part):
    """A group to open. The fields are those of `Publisher.group`."""

    group_id: StrictStr = Field(description="Name of the group; a run uses it once.")
    num_samples: StrictInt = Field(ge=1, description="Number of its trajectories.")
    num_needed: _NumNeeded = None
    prompt_uid: _PromptUid = ""
    purpose: _Purpose = Purpose.TRAIN.value
    samples: _Samples = Field(
        None,
        description="Samples that this writer opens with the group; null for all. A sample that no "
        "writer opens here is opened by its first turn, by any writer.",
    )

    def opening(self) -> Opening:
        """Return the checked opening; InvalidTurnError names a wrong field."""
        group = checked_opening(
            self.group_id,
            self.num_samples,
            self.prompt_uid,
            num_needed=self.num_needed,
            purpose=self.purpose,
        )
        if not isinstance(self.samples, list | None):
            raise InvalidTurnError(
                "samples", f"expected a list of numbers, got {shown(self.samples)}"
            )
        return opening_of(group, samples=self.samples)


class TurnItem(_Member):
    """One turn of a trajectory, and perhaps its end.

    An item without a turn and without an end renews the lease, and returns the next index.
    """

    num_samples: StrictInt | None = Field(
        None, ge=1, description="As the group is opened; needed if the first turn opens it."
    )
    num_needed: _NumNeeded = None
    prompt_uid: _PromptUid = ""
    purpose: _Purpose = Purpose.TRAIN.value
    turn: StrictInt | None = Field(None, ge=0, description="Index of the turn, from 0.")
    prompt_ids: PromptIds = None
    response_ids: ResponseIds = None
    logprobs: Logprobs = None
    loss_mask: LossMask = None
    token_weights: Weights = None
    rewards: Rewards = None
    reward: StrictFloat | None = Field(None, description="Reward of the turn, for its last token.")
    policy_version: StrictInt | None = None
    version_runs: VersionRuns = Field([])
    extras: dict[StrictStr, Any] | None = None
    anchor: StrictStr | StrictInt | None = None
    allow_empty: StrictBool = False
    seal: SealFields | None = Field(None, description="Ends the trajectory after the turn.")
    abandon: AbandonFields | None = Field(None, description="Abandons it after the turn.")

    def write(self, item: int) -> Write:
        """Return the checked write of this item; InvalidTurnError names a wrong field."""
        key = checked_key(self.key, num_samples=self.num_samples)
        if self.seal is not None and self.abandon is not None:
            raise InvalidTurnError("abandon", "is present, and so is seal: a trajectory ends once")
        turns = self._turns()
        seal = None
        if self.seal is not None:
            with named_fields("seal"):
                seal = self.seal.seal()
        return Write(
            item=item,
            key=key,
            group=_group_of(self),
            first=self.turn if turns else None,
            turns=turns,
            seal=seal,
            abandon_reason=None if self.abandon is None else self.abandon.reason,
        )

    def _turns(self) -> Sequence[WrittenTurn]:
        values = {name: getattr(self, name) for name in TurnFields.model_fields}
        given = {"turn": self.turn, **values, "version_runs": self.version_runs or None}
        given["allow_empty"] = self.allow_empty or None
        present = [name for name, value in given.items() if value is not None]
        for name in ("turn", "prompt_ids", "response_ids"):
            if present and given[name] is None:
                raise InvalidTurnError(name, f"is missing, and the item has {', '.join(present)}")
        return (TurnFields.model_construct(**values).checked(),) if present else ()


class TrajectoryItem(_Member, SealFields):
    """A whole trajectory: all of its turns, and its end."""

    num_samples: StrictInt = Field(ge=1, description="Number of trajectories of the group.")
    num_needed: _NumNeeded = None
    prompt_uid: _PromptUid = ""
    purpose: _Purpose = Purpose.TRAIN.value
    turns: Annotated[list[TurnFields], FailFast()] = Field(
        description="In the order of sampling. Only a trajectory with status error may have none."
    )

    def write(self, item: int) -> Write:
        """Return the checked write of this item; InvalidTurnError names a wrong field."""
        key = checked_key(self.key, num_samples=self.num_samples)
        turns: list[WrittenTurn] = []
        for number, turn in enumerate(self.turns):
            with named_fields("turns", number):
                turns.append(turn.checked())
        seal = self.seal()
        require_turns(len(turns), Status(seal.status))
        return Write(item=item, key=key, group=_group_of(self), first=0, turns=turns, seal=seal)


class GroupsBody(Part):
    """Groups to open."""

    items: Annotated[list[GroupFields], FailFast()] = Field(max_length=MAX_WRITES)

    def openings(self) -> list[Opening]:
        """Return the checked openings; InvalidTurnError names item and field."""
        check_num_members((each.num_samples, each.samples) for each in self.items)
        openings: list[Opening] = []
        for number, item in enumerate(self.items):
            with named_fields("items", number):
                openings.append(item.opening())
        return openings


class TurnsBody(Part):
    """Turns of trajectories; several of one trajectory in the order of their indexes."""

    items: Annotated[list[TurnItem], FailFast()] = Field(max_length=MAX_WRITES)

    def writes(self) -> list[Write]:
        """Return the checked writes; InvalidTurnError names item and field."""
        return _writes(self.items)


class TrajectoriesBody(Part):
    """Whole trajectories."""

    items: Annotated[list[TrajectoryItem], FailFast()] = Field(max_length=MAX_WRITES)

    @field_validator("items", mode="before")
    @classmethod
    def _refuse_many_turns(cls, items: Any) -> Any:
        """Count the turns of all items, before any is built."""
        if isinstance(items, list):
            given = cast("list[Any]", items)
            turns = [each.get("turns") for each in given if isinstance(each, dict)]
            if sum(len(each) for each in turns if isinstance(each, list)) > MAX_TURNS:
                raise PydanticCustomError(
                    "many_turns", "more than {most} turns", {"most": MAX_TURNS}
                )
        return items

    def writes(self) -> list[Write]:
        """Return the checked writes; InvalidTurnError names item and field."""
        return _writes(self.items)


def _writes(items: Sequence[TurnItem | TrajectoryItem]) -> list[Write]:
    writes: list[Write] = []
    for number, item in enumerate(items):
        with named_fields("items", number):
            writes.append(item.write(number))
    return writes


def _group_of(item: TurnItem | TrajectoryItem) -> GroupOpened | None:
    if item.num_samples is None:
        return None
    return checked_opening(
        item.group_id,
        item.num_samples,
        item.prompt_uid,
        num_needed=item.num_needed,
        purpose=item.purpose,
    )
