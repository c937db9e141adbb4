"""Parts of JSON bodies: a turn, and the end of a trajectory.

A list of numbers becomes an array at once. All checks are those of the SDK, so that an error has
the same words.
"""

from __future__ import annotations

import array
from typing import Annotated, Any, Final

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from turnstream.generator.encode.checks import checked_turn
from turnstream.types import Status, VersionRun
from turnstream_server.gateway.rest.ingest.writes import Seal, WrittenTurn

UNKNOWN: Final = "unknown_field"
"""Type of the error of an unknown field."""


def _ids(values: Any) -> Any:
    """Return int32 (N,) of a list of token ids; any other value is left to the checks."""
    try:
        return np.asarray(array.array("i", values)) if type(values) is list else values
    except (TypeError, OverflowError):
        return values


def _floats(values: Any) -> Any:
    """Return float32 (N,) of a list of numbers; any other value is left to the checks."""
    try:
        return np.asarray(array.array("f", values)) if type(values) is list else values
    except (TypeError, OverflowError):
        return values


def _mask(values: Any) -> Any:
    """Return uint8 (N,) of a list of whole numbers below 256; any other is left to the checks."""
    try:
        return np.frombuffer(bytes(values), np.uint8) if type(values) is list else values
    except (TypeError, ValueError):
        return values


def _array_of(item: dict[str, Any], description: str) -> Any:
    return WithJsonSchema({"type": "array", "items": item, "description": description})


_ID: Final = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
PromptIds = Annotated[
    Any,
    PlainValidator(_ids),
    _array_of(_ID, "Every token that the model saw, those of earlier turns included."),
]
ResponseIds = Annotated[Any, PlainValidator(_ids), _array_of(_ID, "The sampled tokens.")]
Logprobs = Annotated[
    Any,
    PlainValidator(_floats),
    _array_of(
        {"type": "number"},
        "One per response token, in nats, under the sampling policy; at most 0.",
    ),
]
LossMask = Annotated[
    Any,
    PlainValidator(_mask),
    _array_of(
        {"type": "number", "minimum": 0, "maximum": 1},
        "One per response token, 1 where it is trained. Numbers between 0 and 1 are weights.",
    ),
]
Weights = Annotated[
    Any,
    PlainValidator(_floats),
    _array_of({"type": "number", "minimum": 0}, "One per response token: factors of the loss."),
]
Rewards = Annotated[
    Any, PlainValidator(_floats), _array_of({"type": "number"}, "One per response token.")
]
_Numbers = Annotated[
    Any, WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})
]
_Texts = Annotated[
    Any, WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}})
]


class Part(BaseModel):
    """An object of a body. It reports one error: a body may have millions of wrong fields."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict) and not given.keys() <= cls.model_fields.keys():
            name = next(each for each in given if each not in cls.model_fields)
            raise PydanticCustomError(UNKNOWN, "unknown field", {"name": name})
        return given


class VersionRunFields(Part):
    """Consecutive response tokens that one version of the weights sampled."""

    version: StrictInt | None = Field(description="Null where the tokens were observed.")
    num_tokens: StrictInt = Field(description="At least 1.")


VersionRuns = Annotated[
    list[VersionRunFields],
    FailFast(),
    BeforeValidator(lambda given: [] if given is None else given),
]


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
    version_runs: VersionRuns = Field(
        [], description="In place of policy_version, if several versions sampled it."
    )
    extras: dict[StrictStr, Any] | None = Field(
        None, description="Declared extra columns, each for the whole turn."
    )
    anchor: StrictStr | StrictInt | None = Field(
        None, description="State of the environment when the turn began."
    )
    allow_empty: StrictBool = Field(False, description="Accept a response without tokens.")

    def checked(self) -> WrittenTurn:
        """Return the turn with checked arrays; InvalidTurnError names a wrong field."""
        runs = [VersionRun(run.version, run.num_tokens) for run in self.version_runs]
        turn = checked_turn(
            self.prompt_ids,
            self.response_ids,
            logprobs=self.logprobs,
            loss_mask=self.loss_mask,
            token_weights=self.token_weights,
            rewards=self.rewards,
            reward=self.reward,
            policy_version=self.policy_version,
            version_runs=runs,
            anchor=self.anchor,
            allow_empty=self.allow_empty,
        )
        return WrittenTurn(turn, self.extras)


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

    def seal(self) -> Seal:
        """Return the checked seal; InvalidTurnError names a wrong field."""
        return Seal(**{name: getattr(self, name) for name in SealFields.model_fields}).checked()


class AbandonFields(Part):
    """The end of a trajectory of which nothing is trained."""

    reason: StrictStr = Field(description="For the ledger; its first 200 characters are kept.")
