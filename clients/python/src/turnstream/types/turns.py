"""What generators send: turns, trajectories, groups.

Shape suffixes in docstrings: P prompt tokens, N new prompt tokens, R response tokens.
"""

from __future__ import annotations

import collections.abc as abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnstream.types.extras import ExtraPiece
from turnstream.types.names import encode_name

Anchor = str | bytes | int
"""Names the state that a turn began in: a text or bytes, of which 64 bits of a hash are kept, or
such a hash, from 0 to 2^64 - 1 (`turnstream.batching.anchors`)."""

NO_PARENT = -1
"""`parent_turn` of a turn whose prompt shares no token with an earlier turn."""


class Status(StrEnum):
    """How an episode ended, in the generator's words."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    ERROR = "error"


class Purpose(StrEnum):
    """What a group is sampled for."""

    TRAIN = "train"
    EVAL = "eval"


class TrajectoryState(StrEnum):
    """Where an accepted trajectory is. Every accepted trajectory is in exactly one of these."""

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
    """What makes a trajectory unique in its run."""

    group_id: str
    sample: int
    attempt: int = 0

    @property
    def trajectory_id(self) -> str:
        """Its name inside the run: `<encoded group>/<sample>/<attempt>`."""
        return f"{encode_name(self.group_id)}/{self.sample}/{self.attempt}"

    @property
    def readable_name(self) -> str:
        """The same as people read it."""
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
        version_runs: which weights sampled the response, covering all R tokens; empty if unknown.
        extras: values of the columns that the run declares, by name, each said of the whole turn:
            see `turnstream.types.extras`.
        anchor: the state that the environment was in when the turn began; None if it is not said.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None = None
    loss_mask: NDArray[np.uint8] | None = None
    rewards: NDArray[np.float32] | None = None
    version_runs: tuple[VersionRun, ...] = ()
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    anchor: Anchor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTurn:
    """A turn as it is sent and stored: only what its parent does not already hold.

    The full prompt is the first `shared_tokens` tokens of the parent's prompt + response,
    followed by `new_prompt_ids`.

    Attributes:
        index: position in the trajectory, from 0.
        parent_turn: index of the earlier turn, or NO_PARENT with `shared_tokens` 0.
        shared_tokens: tokens of the parent's prompt + response that begin this prompt.
        token_ids: int32 (N + R,), the new prompt tokens, then the response.
        num_response_tokens: R.
        logprobs, loss_mask, rewards: as in Turn; None has the meaning it has there.
        payload_crc: CRC-32 that the record carries: of the record, header and arrays; 0 before.
        extras: declared columns by name, in order of name: what the parent does not hold of them.
        anchor: hash of the state that the turn began in, 64 bits; None if it is not said.
    """

    index: int
    parent_turn: int
    shared_tokens: int
    token_ids: NDArray[np.int32]
    num_response_tokens: int
    logprobs: NDArray[np.float32] | None = None
    loss_mask: NDArray[np.uint8] | None = None
    rewards: NDArray[np.float32] | None = None
    version_runs: tuple[VersionRun, ...] = ()
    payload_crc: int = 0
    extras: Mapping[str, ExtraPiece] = field(default_factory=dict[str, ExtraPiece])
    anchor: int | None = None

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


class TurnShape(NamedTuple):
    """Lengths of one stored turn, in tokens: all that planning needs to know of it."""

    parent_turn: int
    shared_tokens: int
    num_new_prompt_tokens: int
    num_response_tokens: int
    num_trained_tokens: int

    @property
    def num_tokens(self) -> int:
        """Length of this turn's full prompt + response."""
        return self.shared_tokens + self.num_new_prompt_tokens + self.num_response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedTrajectory:
    """What the plan knows of a finished trajectory; its payload stays in the store.

    Attributes:
        key: group, sample, attempt.
        lease_epoch: fencing number of the writer that sealed it.
        status: how the episode ended.
        reward: outcome reward; None where the turns carry it, or where components do.
        reward_components: named rewards, ordered by name.
        turns: the lengths of every turn, in order.
        turn_rewards: sum of the token rewards of every turn, same length as `turns`.
        payload_crcs: CRC-32 of every turn's payload, same length as `turns`.
        anchors: hash of the state that every turn began in, None where it is unknown; empty where
            no turn has any.
        oldest_version: the oldest version that sampled a trained token; None if unknown.
        newest_version: the newest such version.
        turn_versions: for every turn how many trained tokens each version sampled, ascending, None
            where it is unknown; empty where one version, or an unknown one, sampled all of them.
        num_payload_bytes: bytes of the stored records.
        has_logprobs: every trained token came with a log-probability.
        sampling: sampling parameters such as temperature, in the generator's words.
        tags: free labels.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """A whole finished episode in memory, for generators that have it all at once.

    Attributes:
        turns: in the order in which they were sampled.
        sample: index inside the group, from 0.
        reward: outcome reward; None where `reward_components` or the turns carry it.
        awaits_reward: the reward, or some of its components, will be posted later.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The trajectories of one visit of a prompt, compared with each other.

    Attributes:
        purpose: those of an evaluation are never trained.
    """

    group_id: str
    trajectories: abc.Sequence[Trajectory]
    prompt_uid: str = ""
    purpose: Purpose = Purpose.TRAIN
