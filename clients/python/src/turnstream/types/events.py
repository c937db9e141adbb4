"""What the plan of a run depends on: its events, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from turnstream.types.turns import Purpose, SealedTrajectory, TrajectoryKey

Leftover = Literal["short", "carry", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOpened:
    """A visit of a prompt began.

    Attributes:
        num_samples: trajectories that are sampled.
        num_needed: how many of them decide the group, the first that are sealed and valid; 0, as
            in records of older releases, stands for all of them.
        purpose: a group that is opened to evaluate is never trained.
    """

    group_id: str
    prompt_uid: str
    num_samples: int
    num_needed: int = 0
    purpose: Purpose = Purpose.TRAIN

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_needed", self.num_needed or self.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryAbandoned:
    """The writer gave up, or its lease ended, before the seal."""

    key: TrajectoryKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryDied:
    """The payload of a sealed trajectory is unusable: damaged, or not what the seal says."""

    key: TrajectoryKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionAnnounced:
    """New weights exist.

    Attributes:
        version: their name, used once.
        step: the batch after which they were made; 0 before the first.
        weights_uri: where a generator can load them; empty if they travel another way.
    """

    version: int
    step: int
    lineage: str
    weights_uri: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The trainer began again behind this step: weights that were made beyond it are gone."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClosed:
    """No group will be opened any more, unless the run is reopened.

    Attributes:
        leftover: what becomes of complete groups that make no whole batch at the end: a last,
            "short" batch; or they are kept for a run that is reopened, "carry"; or "drop".
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
    """A group, or a reward, took longer than the run allows.

    Attributes:
        awaited: the trajectory whose reward did not come; None for the deadline of the group.
        num_refills: refills granted to the group before: each of them gave it a new deadline.
    """

    group_id: str
    awaited: TrajectoryKey | None = None
    num_refills: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillGranted:
    """Another attempt of a sample may begin, in place of one that ended or hangs.

    Attributes:
        number: of the group's refills, from 1.
    """

    key: TrajectoryKey
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPosted:
    """The reward of a trajectory that was sealed without it.

    Attributes:
        reward_components: named rewards, ordered by name; they join those of the seal.
    """

    key: TrajectoryKey
    reward: float | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDue:
    """The planner chooses the groups of a batch from what was complete before this event.

    Written only in runs whose choice depends on more than the order of completion: whoever folds
    the events again comes to the same choice, however much has happened since.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRevised:
    """The run has another configuration from here on: what is decided later is judged by it.

    Attributes:
        revision: its number.
        step: the first batch that is planned with it.
    """

    revision: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlansWithdrawn:
    """The plans from a step on, none of which was stepped, are void: their groups are ready again.

    Attributes:
        step: the first that is planned again.
        dead: the members whose payload was damaged after they were planned; they are left out.
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
