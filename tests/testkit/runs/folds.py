"""Events of one group, and the fold of them. The group is "g0" unless named."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from testkit.plans import config, sealed
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.members import FoldState
from turnstream.batching.fold.readiness import RunFold
from turnstream.records.snapshots import PlannerSnapshot, decode_snapshot, encode_snapshot
from turnstream.types import (
    DeadlineFired,
    Event,
    GroupOpened,
    Purpose,
    RefillGranted,
    RewardPosted,
    SealedTrajectory,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
)

DEADLINE = DeadlineFired(group_id="g0")


def key(sample: int, attempt: int = 0, *, group_id: str = "g0") -> TrajectoryKey:
    """Return the key of an attempt."""
    return TrajectoryKey(group_id, sample, attempt)


def opened(
    num_samples: int = 2,
    num_needed: int = 0,
    *,
    group_id: str = "g0",
    purpose: Purpose = Purpose.TRAIN,
) -> GroupOpened:
    """A group was opened."""
    return GroupOpened(
        group_id=group_id,
        prompt_uid=f"uid of {group_id}",
        num_samples=num_samples,
        num_needed=num_needed,
        purpose=purpose,
    )


def seals(*samples: int, group_id: str = "g0") -> list[Event]:
    """Return the seals of these samples, in this order."""
    return [sealed(group_id, sample=sample) for sample in samples]


def awaiting(sample: int, **fields: Any) -> SealedTrajectory:
    """A trajectory was sealed, and its reward follows."""
    return replace(sealed(sample=sample, reward=None), awaits_reward=True, **fields)


def abandoned(sample: int, attempt: int = 0, *, group_id: str = "g0") -> TrajectoryAbandoned:
    """An attempt was abandoned."""
    return TrajectoryAbandoned(key=key(sample, attempt, group_id=group_id), reason="lease")


def died(sample: int, attempt: int = 0, *, group_id: str = "g0") -> TrajectoryDied:
    """The payload of an attempt is damaged."""
    return TrajectoryDied(key=key(sample, attempt, group_id=group_id), reason="checksum")


def posted(sample: int, reward: float | None = 1.0, **components: float) -> RewardPosted:
    return RewardPosted(key=key(sample), reward=reward, reward_components=components)


def missed(sample: int) -> DeadlineFired:
    return DeadlineFired(group_id="g0", awaited=key(sample))


def granted(number: int, sample: int, attempt: int = 1) -> RefillGranted:
    return RefillGranted(key=key(sample, attempt), number=number)


def fold(events: Iterable[Event], of: BatchingConfig | None = None) -> tuple[RunFold, list[Any]]:
    """Return the fold of these events, with ids "0-0", "1-0", ..., and all decisions."""
    folded = RunFold(of or config())
    return folded, apply(folded, *events)


def apply(folded: RunFold, *events: Event, first: int = 0) -> list[Any]:
    """Apply events with ids from `first` on; return the decisions."""
    return [
        each
        for number, event in enumerate(events, start=first)
        for each in folded.apply(f"{number}-0", event)
    ]


def samples(folded: RunFold) -> list[list[int]]:
    """Return the samples of each ready group."""
    return [[member.key.sample for member in group.members] for group in folded.ready]


def snapshot_of(state: FoldState, **fields: Any) -> PlannerSnapshot:
    usual: dict[str, Any] = {"position": "1-0", "step": 0, "manifest_hash": "", "next_row_id": 0}
    return PlannerSnapshot(fold=state, **{**usual, **fields})


def restored(folded: RunFold, of: BatchingConfig) -> RunFold:
    """Return the fold of a planner that continues from the snapshot of this one."""
    return RunFold(of, decode_snapshot(encode_snapshot(snapshot_of(folded.state))).fold)
