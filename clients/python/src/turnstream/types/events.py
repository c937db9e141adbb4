"""What the plan of a run depends on: its events, in order."""

from __future__ import annotations

from dataclasses import dataclass

from turnstream.types.turns import SealedTrajectory, TrajectoryKey


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOpened:
    """A visit of a prompt began; `num_samples` trajectories will be compared."""

    group_id: str
    prompt_uid: str
    num_samples: int


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
class RunClosed:
    """No group will be opened any more; what is complete at the end makes a last, short batch."""

    reason: str = ""


Event = (
    GroupOpened
    | SealedTrajectory
    | TrajectoryAbandoned
    | TrajectoryDied
    | VersionAnnounced
    | RunClosed
)
