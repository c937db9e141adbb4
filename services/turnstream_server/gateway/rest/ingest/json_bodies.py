"""JSON bodies of the ingest routes, and the writes that they ask for.

An error names the place, the value and what was expected: `items.3.logprobs`. A list of numbers
becomes an array at once. Its checks are those of the SDK, so that an error has the same words.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Annotated, Any, Final, cast, get_args

import numpy as np
from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from turnstream.errors import InvalidTurnError
from turnstream.generator.encode.group_checks import require_turns
from turnstream.types import Purpose, Siblings, Status
from turnstream.types.names import quoted
from turnstream_server.gateway.rest.bodies import MAX_TURNS, MAX_WRITES, Part, parse_body
from turnstream_server.gateway.rest.ingest.writes import (
    Fields,
    Opening,
    Write,
    WrittenTurn,
    check_num_members,
    checked_items,
    group_of,
    key_of,
    named_fields,
    opening_of,
    seal_of,
    turn_of,
)


def _array(typecode: str) -> PlainValidator:
    """Return the conversion of a list to an array; other values are left to the checks."""

    def convert(values: Any) -> Any:
        try:
            return np.asarray(array.array(typecode, values)) if type(values) is list else values
        except (TypeError, OverflowError):
            return values

    return PlainValidator(convert)


def _array_of(item: dict[str, Any], description: str) -> Any:
    return WithJsonSchema({"type": "array", "items": item, "description": description})


_ID: Final = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
PromptIds = Annotated[
    Any,
    _array("i"),
    _array_of(_ID, "Every token that the model saw, those of earlier turns included."),
]
ResponseIds = Annotated[Any, _array("i"), _array_of(_ID, "The sampled tokens.")]
Logprobs = Annotated[
    Any,
    _array("f"),
    _array_of(
        {"type": "number"},
        "One per response token, in nats, under the sampling policy; at most 0.",
    ),
]
LossMask = Annotated[
    Any,
    _array("B"),
    _array_of(
        {"type": "number", "minimum": 0, "maximum": 1},
        "One per response token, 1 where it is trained. Numbers between 0 and 1 are weights.",
    ),
]
Weights = Annotated[
    Any,
    _array("f"),
    _array_of({"type": "number", "minimum": 0}, "One per response token: factors of the loss."),
]
Rewards = Annotated[Any, _array("f"), _array_of({"type": "number"}, "One per response token.")]
_Numbers = Annotated[
    Any, WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})
]
_Texts = Annotated[
    Any, WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}})
]


class VersionRunFields(Part):
    """Consecutive response tokens that one version of the weights sampled."""

    version: StrictInt | None = Field(description="Null where the tokens were observed.")
    num_tokens: StrictInt = Field(description="At least 1.")


class TurnFields(Part):
    """One model call. The fields are those of `TrajectoryWriter.append`."""

    prompt_ids: PromptIds
    response_ids: ResponseIds
    logprobs: Logprobs = None
    loss_mask: LossMask = None
    token_weights: Weights = None
    rewards: Rewards = None
    reward: StrictFloat | None = Field(None, description="Reward of the turn, for its last token.")
    policy_version: StrictInt | None = Field(
        None, description="Version of the weights that sampled the response."
    )
    version_runs: Annotated[
        list[VersionRunFields],
        FailFast(),
        BeforeValidator(lambda given: [] if given is None else given),
    ] = Field([], description="In place of policy_version, if several versions sampled it.")
    extras: dict[StrictStr, Any] | None = Field(
        None, description="Declared extra columns, each for the whole turn."
    )
    anchor: StrictStr | StrictInt | None = Field(
        None, description="State of the environment when the turn began."
    )
    call_id: StrictStr | None = Field(
        None,
        description="Name of the model call, 1 to 64 printable ASCII characters. A turn whose name "
        "is stored is not stored again, whatever its index.",
    )
    allow_empty: StrictBool = Field(False, description="Accept a response without tokens.")


class SealFields(Part):
    """The end of a trajectory. The fields are those of `TrajectoryWriter.seal`."""

    reward: StrictFloat | None = Field(None, description="Outcome of the whole episode.")
    reward_components: _Numbers = Field(None, description="Named rewards.")
    status: StrictStr = Field(
        Status.COMPLETED.value,
        description="How the episode ended.",
        json_schema_extra={"enum": [each.value for each in Status]},
    )
    sampling: _Numbers = Field(None, description="Parameters such as temperature.")
    tags: _Texts = Field(None, description="Labels, at most 64.")
    metrics: _Numbers = Field(None, description="Finite numbers, at most 64.")
    awaits_reward: StrictBool = Field(False, description="The reward will be posted later.")
    siblings: StrictStr = Field(
        "train",
        description="Treatment of a turn that no later prompt continues, while another turn with "
        "the same prompt is continued: it is trained, left out of the rows, or refused.",
        json_schema_extra={"enum": [*get_args(Siblings)]},
    )


class AbandonFields(Part):
    """The end of a trajectory of which nothing is trained."""

    reason: StrictStr = Field(description="For the ledger; its first 200 characters are kept.")


class _OfGroup(Part):
    """The group of an item, and how it is opened. The fields are those of `Publisher.group`."""

    group_id: StrictStr = Field(
        description="Name of the group, the same for all samples that are compared. A run uses it "
        "once."
    )
    num_needed: StrictInt | None = Field(
        None,
        description="Members that decide the group, the first that are sealed; null for all.",
    )
    prompt_uid: StrictStr = Field("", description="The dataset's own name of the prompt.")
    purpose: StrictStr = Field(
        Purpose.TRAIN.value,
        description="An eval group is never trained.",
        json_schema_extra={"enum": [each.value for each in Purpose]},
    )


_Samples = Annotated[
    Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})
]


class GroupFields(_OfGroup):
    """A group to open."""

    num_samples: StrictInt = Field(ge=1, description="Number of its trajectories.")
    samples: _Samples = Field(
        None,
        description="Samples that this writer opens with the group; null for all. A sample that no "
        "writer opens here is opened by its first turn, by any writer.",
    )


class _OfTrajectory(_OfGroup):
    sample: StrictInt = Field(ge=0, description="From 0 to num_samples - 1.")
    attempt: StrictInt = Field(0, ge=0, description="Number of the retry of an abandoned sample.")


class TurnItem(_OfTrajectory, TurnFields):
    """One turn of a trajectory, and perhaps its end.

    An item without a turn and without an end renews the lease, and returns the next index.
    """

    num_samples: StrictInt | None = Field(
        None, ge=1, description="As the group is opened; needed if the first turn opens it."
    )
    turn: StrictInt | None = Field(None, ge=0, description="Index of the turn, from 0.")
    prompt_ids: PromptIds = None
    response_ids: ResponseIds = None
    seal: SealFields | None = Field(None, description="Ends the trajectory after the turn.")
    abandon: AbandonFields | None = Field(None, description="Abandons it after the turn.")


class TrajectoryItem(_OfTrajectory, SealFields):
    """A whole trajectory: all of its turns, and its end."""

    num_samples: StrictInt = Field(ge=1, description="Number of trajectories of the group.")
    turns: Annotated[list[TurnFields], FailFast()] = Field(
        description="In the order of sampling. Only a trajectory with status error may have none."
    )


class GroupsBody(Part):
    """Groups to open."""

    items: Annotated[list[GroupFields], FailFast()] = Field(max_length=MAX_WRITES)


class TurnsBody(Part):
    """Turns of trajectories; several of one trajectory in the order of their indexes."""

    items: Annotated[list[TurnItem], FailFast()] = Field(max_length=MAX_WRITES)


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


def parse_groups(body: bytes) -> list[Opening]:
    """Return a group to open per item; errors as of `parse_body`."""
    items = [vars(each) for each in parse_body(body, GroupsBody).items]
    check_num_members(items)
    return checked_items(enumerate(items), _opening)


def parse_turns(body: bytes) -> list[Write]:
    """Return a write per turn; errors as of `parse_body`."""
    return checked_items(enumerate(parse_body(body, TurnsBody).items), _turn_write)


def parse_trajectories(body: bytes) -> list[Write]:
    """Return a write per trajectory; errors as of `parse_body`."""
    return checked_items(enumerate(parse_body(body, TrajectoriesBody).items), _write)


def _opening(_: int, fields: Fields) -> Opening:
    samples = fields["samples"]
    if not isinstance(samples, list | None):
        raise InvalidTurnError("samples", f"expected a list of numbers, got {quoted(samples)}")
    return opening_of(fields)


def _turn_write(number: int, item: TurnItem) -> Write:
    key = key_of(vars(item))
    if item.seal is not None and item.abandon is not None:
        raise InvalidTurnError("abandon", "is present, and so is seal: a trajectory ends once")
    turns = _turns(item)
    seal = None
    if item.seal is not None:
        with named_fields("seal"):
            seal = seal_of(vars(item.seal))
    return Write(
        item=number,
        key=key,
        group=None if item.num_samples is None else group_of(vars(item)),
        first=item.turn if turns else None,
        turns=turns,
        seal=seal,
        abandon_reason=None if item.abandon is None else item.abandon.reason,
    )


def _turns(item: TurnItem) -> Sequence[WrittenTurn]:
    """Return the turn of an item, if it has any field of one."""
    names = ("turn", *TurnFields.model_fields)
    given = {name: getattr(item, name) for name in names}
    given["version_runs"] = item.version_runs or None
    given["allow_empty"] = item.allow_empty or None
    present = [name for name, value in given.items() if value is not None]
    for name in ("turn", "prompt_ids", "response_ids"):
        if present and given[name] is None:
            raise InvalidTurnError(name, f"is missing, and the item has {', '.join(present)}")
    return (_turn(item),) if present else ()


def _turn(fields: TurnFields) -> WrittenTurn:
    runs = [vars(each) for each in fields.version_runs]
    return turn_of({**vars(fields), "version_runs": runs}, extras=fields.extras)


def _write(number: int, item: TrajectoryItem) -> Write:
    key = key_of(vars(item))
    turns = checked_items(enumerate(item.turns), lambda _, each: _turn(each), place="turns")
    seal = seal_of(vars(item))
    require_turns(len(turns), Status(seal.status))
    group = group_of(vars(item))
    return Write(item=number, key=key, group=group, first=0, turns=turns, seal=seal)
