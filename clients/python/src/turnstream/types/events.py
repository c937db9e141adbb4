"""The events of a run: they and their order determine its plan. `turns.py` has those of writers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from turnstream.types.turns import GroupOpened, SealedTrajectory, TrajectoryKey

Leftover = Literal["short", "carry", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryAbandoned:
    """The writer abandoned the trajectory, or its lease ended, before the seal."""

    key: TrajectoryKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryDied:
    """The payload of a sealed trajectory is damaged, or contradicts the seal."""

    key: TrajectoryKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionAnnounced:
    """New weights exist.

    Attributes:
        version: their name, used once.
        step: the last step in these weights; 0 before the first.
        weights_uri: address for generators; empty if they travel another way.
    """

    version: int
    step: int
    lineage: str
    weights_uri: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The trainer resumed after this step: later weights are void."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClosed:
    """The run was closed: no group is opened unless it is reopened.

    Attributes:
        leftover: complete groups that make no whole batch at the end form a last, "short" batch,
            are kept for a reopened run ("carry"), or are dropped ("drop").
    """

    reason: str = ""
    leftover: Leftover = "short"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReopened:
    """Groups may be opened again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """Nothing is planned after this step, unless the run is reopened."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineFired:
    """The deadline of a group, or of a reward, has passed.

    Attributes:
        awaited: the trajectory without its reward; None for the deadline of the group.
        num_refills: earlier refills of the group; each of them set a new deadline.
    """

    group_id: str
    awaited: TrajectoryKey | None = None
    num_refills: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillGranted:
    """Another attempt of a sample may replace one that ended or hangs.

    Attributes:
        number: number of the refill in its group, from 1.
    """

    key: TrajectoryKey
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPosted:
    """The reward of a trajectory that was sealed without it.

    Attributes:
        reward_components: named rewards, sorted; they join those of the seal.
    """

    key: TrajectoryKey
    reward: float | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDue:
    """The planner chooses the groups of a batch from those complete before this event.

    Written only in runs whose choice depends on more than the order of completion. A later fold of
    the events then makes the same choice.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRevised:
    """The run has another configuration for all later decisions.

    Attributes:
        revision: number of the configuration.
        step: the first step planned with it.
    """

    revision: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlansWithdrawn:
    """The plans from a step on are void, and their groups are ready again. None was stepped.

    Attributes:
        step: the first step that is planned again.
        dead: trajectories whose payload was damaged after they were planned; they are excluded.
    """

    step: int
    dead: tuple[TrajectoryKey, ...]


Event = (
    GroupOpened
    | SealedTrajectory
    | TrajectoryAbandoned
    | TrajectoryDied
    | VersionAnnounced
    | RunClosed
    | DeadlineFired
    | RefillGranted
    | RewardPosted
    | BatchDue
    | ConfigRevised
    | RunReopened
    | RunFinished
    | RolledBack
    | PlansWithdrawn
)
