"""The data of generators: turns, trajectories, groups, and the events of an opening and a seal.

Shape suffixes in docstrings: P prompt tokens, N new prompt tokens, R response tokens.
"""

from __future__ import annotations

import collections.abc as abc
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnstream.types.extras import ExtraPiece
from turnstream.types.names import encode_name

Anchor = str | bytes | int
"""Name of the state at the beginning of a turn: a text or bytes, stored as 64 bits of a hash, or
such a hash, from 0 to 2^64 - 1 (`turnstream.batching.merge.merging`)."""

Siblings = Literal["train", "mask", "refuse"]
"""Treatment of a turn without continuation whose prompt has another answer that was continued."""

NO_PARENT = -1
"""`parent_turn` of a turn whose prompt shares no token with an earlier turn."""


class Status(StrEnum):
    """The generator's status of a finished episode.

    A run masks or trains TRUNCATED and ABORTED by `mask_truncated`, and ERROR by
    `error_trajectories`.
    """

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    ERROR = "error"


class Purpose(StrEnum):
    """The purpose of a group."""

    TRAIN = "train"
    EVAL = "eval"


class TrajectoryState(StrEnum):
    """State of an accepted trajectory. Every accepted trajectory is in exactly one of these."""

    OPEN = "open"
    SEALED = "sealed"
    AWAITING_REWARD = "awaiting_reward"
    PLANNED = "planned"
    STEPPED = "stepped"
    COMMITTED = "committed"
    FILTERED = "filtered"
    EXPIRED = "expired"
    SURPLUS = "surplus"
    INCOMPLETE = "incomplete"
    EVALUATED = "evaluated"
    ABANDONED = "abandoned"
    DEAD = "dead"


class VersionRun(NamedTuple):
    """`num_tokens` consecutive response tokens sampled by the weights named `version`.

    `version` is None where the tokens were observed and not sampled.
    """

    version: int | None
    num_tokens: int


class TrajectoryKey(NamedTuple):
    """The unique key of a trajectory in its run."""

    group_id: str
    sample: int
    attempt: int = 0

    @property
    def trajectory_id(self) -> str:
        """Its name inside the run: `<encoded group>/<sample>/<attempt>`."""
        return f"{encode_name(self.group_id)}/{self.sample}/{self.attempt}"

    @property
    def readable_name(self) -> str:
        """The name for people: `<group>/<sample>/<attempt>`."""
        return f"{self.group_id}/{self.sample}/{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One model call, whole: the full prompt it saw and the response it sampled.

    Attributes:
        prompt_ids: int32 (P,), every token the model saw, earlier turns included.
        response_ids: int32 (R,), the sampled tokens, the end-of-turn token included.
        logprobs: float32 (R,) in nats under the sampling policy, or None if it gave none.
            0.0 where `loss_mask` is 0.
        loss_mask: uint8 (R,), 1 where the token is trained; None trains every response token.
        rewards: float32 (R,), one per response token; None means no reward inside this turn.
        token_weights: float32 (R,), finite and at least 0: the factor of each token's loss. 0.0
            where `loss_mask` is 0; None weighs every trained token with 1.
        version_runs: which weights sampled the response, covering all R tokens; empty if unknown.
        extras: values of the run's extra columns for the whole turn, keyed by column; see
            `turnstream.types.extras`.
        anchor: state of the environment at the beginning of the turn; None if unknown.
        call_id: the caller's name of the model call; a trajectory has one turn of each name.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None = None
    loss_mask: NDArray[np.uint8] | None = None
    rewards: NDArray[np.float32] | None = None
    token_weights: NDArray[np.float32] | None = None
    version_runs: tuple[VersionRun, ...] = ()
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    anchor: Anchor | None = None
    call_id: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)  # a frozen one takes three times as long to make
class StoredTurn:
    """A turn as it is stored: the first `shared_tokens` of its parent are not repeated.

    Attributes:
        index: position in the trajectory, from 0.
        parent_turn: index of the earlier turn, or NO_PARENT with `shared_tokens` 0.
        shared_tokens: tokens of the parent's prompt + response that begin this prompt.
        token_ids: int32 (N + R,), the new prompt tokens, then the response.
        num_response_tokens: R.
        logprobs, loss_mask, rewards, token_weights, version_runs: as in Turn.
        payload_crc: CRC-32 of the record, its header and arrays; 0 before it is encoded.
        extras: own values of the extra columns without those of the parent, sorted.
        anchor: hash of the state at the beginning of the turn, 64 bits; None if unknown.
        call_id: as in Turn.
    """

    index: int
    parent_turn: int
    shared_tokens: int
    token_ids: NDArray[np.int32]
    num_response_tokens: int
    logprobs: NDArray[np.float32] | None = None
    loss_mask: NDArray[np.uint8] | None = None
    rewards: NDArray[np.float32] | None = None
    token_weights: NDArray[np.float32] | None = None
    version_runs: tuple[VersionRun, ...] = ()
    payload_crc: int = 0
    extras: Mapping[str, ExtraPiece] = field(default_factory=dict[str, ExtraPiece])
    anchor: int | None = None
    call_id: str | None = None

    @property
    def new_prompt_ids(self) -> NDArray[np.int32]:
        """int32 (N,), the prompt tokens that follow the shared ones."""
        return self.token_ids[: len(self.token_ids) - self.num_response_tokens]

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """int32 (R,), the sampled tokens."""
        return self.token_ids[len(self.token_ids) - self.num_response_tokens :]

    @property
    def shape(self) -> TurnShape:
        """The lengths of this turn, without its tokens."""
        trained = self.num_response_tokens
        if self.loss_mask is not None:
            trained = int(np.count_nonzero(self.loss_mask))
        return TurnShape(
            parent_turn=self.parent_turn,
            shared_tokens=self.shared_tokens,
            num_new_prompt_tokens=len(self.token_ids) - self.num_response_tokens,
            num_response_tokens=self.num_response_tokens,
            num_trained_tokens=trained,
        )


class StoredTurns(NamedTuple):
    """Stored turns as columns: one value per turn, as the field of StoredTurn with this name."""

    parent_turn: abc.Sequence[int]
    shared_tokens: abc.Sequence[int]
    token_ids: abc.Sequence[NDArray[np.int32]]
    num_response_tokens: abc.Sequence[int]
    logprobs: abc.Sequence[NDArray[np.float32] | None]
    loss_mask: abc.Sequence[NDArray[np.uint8] | None]
    rewards: abc.Sequence[NDArray[np.float32] | None]
    token_weights: abc.Sequence[NDArray[np.float32] | None]
    version_runs: abc.Sequence[tuple[VersionRun, ...]]
    payload_crc: abc.Sequence[int]
    extras: abc.Sequence[Mapping[str, ExtraPiece]]

    @classmethod
    def of(cls, turns: abc.Iterable[StoredTurn]) -> StoredTurns:
        """Return the columns of these turns."""
        return cls.of_values(map(turn_values, turns))

    @classmethod
    def of_values(cls, turns: abc.Iterable[TurnValues]) -> StoredTurns:
        """Return the columns of turns that are tuples of values in the order of the columns."""
        columns: list[Any] = [*zip(*turns, strict=True)]
        return cls(*columns or [()] * len(cls._fields))

    def taken(self, turns: abc.Sequence[int]) -> StoredTurns:
        """Return the columns of the turns at these positions, in this order."""
        if turns == [*range(len(self.payload_crc))]:
            return self
        columns: list[Any] = [[column[turn] for turn in turns] for column in self]
        return StoredTurns(*columns)


TurnValues = tuple[Any, ...]
"""One turn, as the values of StoredTurns in their order."""

turn_values: abc.Callable[[StoredTurn], TurnValues] = operator.attrgetter(*StoredTurns._fields)


class TurnShape(NamedTuple):
    """Lengths of one stored turn, in tokens, for the plan.

    A turn that is left out is in no row: its prompt was asked again, and another answer was
    continued. Later turns may share its prompt, and not its response.
    """

    parent_turn: int
    shared_tokens: int
    num_new_prompt_tokens: int
    num_response_tokens: int
    num_trained_tokens: int
    is_left_out: bool = False

    @property
    def num_tokens(self) -> int:
        """Length of this turn's full prompt + response."""
        return self.shared_tokens + self.num_new_prompt_tokens + self.num_response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOpened:
    """A group was opened.

    Attributes:
        num_samples: trajectories that are sampled.
        num_needed: number of sealed and valid trajectories that complete the group; 0 means all.
        purpose: a group of an evaluation is never trained.
    """

    group_id: str
    prompt_uid: str
    num_samples: int
    num_needed: int = 0
    purpose: Purpose = Purpose.TRAIN

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_needed", self.num_needed or self.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedTrajectory:
    """The description of a finished trajectory for the plan; its payload stays in the store.

    Attributes:
        lease_epoch: fencing number of the writer that sealed it.
        reward: outcome reward; None where the turns carry it, or where components do.
        reward_components: named rewards, sorted.
        turns: the lengths of every turn, in order.
        turn_rewards: sum of the token rewards of every turn, same length as `turns`.
        payload_crcs: CRC-32 of every turn's payload, same length as `turns`.
        anchors: hash of the state at the beginning of every turn, None where unknown; empty if no
            turn has any.
        oldest_version, newest_version: versions that sampled trained tokens; None if unknown.
        turn_versions: for every turn the number of trained tokens of each version, ascending, None
            where unknown; empty if one version, or an unknown one, sampled all of them.
        num_payload_bytes: bytes of the stored records.
        has_logprobs: every trained token came with a log-probability.
        sampling: the generator's sampling parameters, such as temperature.
        metrics: free numbers, aggregated per batch.
        awaits_reward: a reward, or some of its components, will be posted after the seal.
    """

    key: TrajectoryKey
    lease_epoch: int
    status: Status
    reward: float | None
    reward_components: Mapping[str, float]
    turns: tuple[TurnShape, ...]
    turn_rewards: tuple[float, ...]
    payload_crcs: tuple[int, ...]
    anchors: tuple[int | None, ...] = ()
    oldest_version: int | None = None
    newest_version: int | None = None
    turn_versions: tuple[tuple[VersionRun, ...], ...] = ()
    num_payload_bytes: int = 0
    has_logprobs: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    awaits_reward: bool = False

    @property
    def kept_turns(self) -> abc.Sequence[int]:
        """The indexes of the turns that are not left out."""
        return [index for index, turn in enumerate(self.turns) if not turn.is_left_out]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """A complete episode in memory.

    Attributes:
        turns: in the order in which they were sampled.
        sample: index inside the group, from 0.
        reward: outcome reward; None where `reward_components` or the turns carry it.
        awaits_reward: the reward, or some of its components, will be posted later.
        siblings: as in `TrajectoryWriter.seal`.
    """

    turns: abc.Sequence[Turn]
    sample: int
    attempt: int = 0
    reward: float | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict[str, float])
    status: Status = Status.COMPLETED
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    awaits_reward: bool = False
    siblings: Siblings = "train"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The trajectories of one prompt, which are compared with each other.

    Attributes:
        purpose: groups of an evaluation are never trained.
    """

    group_id: str
    trajectories: abc.Sequence[Trajectory]
    prompt_uid: str = ""
    purpose: Purpose = Purpose.TRAIN
