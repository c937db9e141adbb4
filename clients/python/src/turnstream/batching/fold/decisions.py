"""Decisions of the fold of a run: values that the planner turns into writes to the ledger."""

from __future__ import annotations

from dataclasses import dataclass

from turnstream.types import (
    EvalGroup,
    EvalResult,
    SealedTrajectory,
    TrajectoryKey,
    TrajectoryState,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    """A decided group with enough members to train.

    Attributes:
        members: the valid ones, in order of (sample, attempt).
        completed_by: id of the event that made the group what it is.
    """

    group_id: str
    prompt_uid: str
    members: tuple[SealedTrajectory, ...]
    completed_by: str
    opened_by: str = "0-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberDropped:
    """A sealed trajectory that will not be trained, also if its group is.

    Attributes:
        state: SURPLUS for one that came after its group was decided, or after another of the same
            sample; INCOMPLETE for one that cannot be compared with the others.
    """

    key: TrajectoryKey
    state: TrajectoryState
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDropped:
    """A group that will not be trained: nothing that comes later changes that.

    Attributes:
        state: FILTERED, INCOMPLETE or EXPIRED.
        keys: its sealed trajectories, which go into this state; empty if it had none.
    """

    group_id: str
    state: TrajectoryState
    reason: str
    keys: tuple[TrajectoryKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCut:
    """A group is ready while samples of it are still open: these are surplus, and may stop.

    Attributes:
        num_granted: refills of it that were granted before; a later one opens it again.
    """

    group_id: str
    reason: str
    num_granted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvaluated:
    """An evaluation group has finished; its open attempts may stop.

    Attributes:
        keys: members that count.
        result: outcome of the group; None without a member.
        total: outcome of its version so far; None without a member, or where it is final already.
    """

    group_id: str
    keys: tuple[TrajectoryKey, ...]
    result: EvalGroup | None
    total: EvalResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillWanted:
    """Another attempt of a sample, in place of one that ended or hangs.

    Attributes:
        key: first attempt that no event has named; it may be taken all the same.
        number: position among the refills of the group, from 1; the same number is the same refill.
    """

    key: TrajectoryKey
    prompt_uid: str
    number: int


Decision = MemberDropped | GroupDropped | GroupCut | GroupEvaluated | RefillWanted


def surplus_member(key: TrajectoryKey, reason: str) -> MemberDropped:
    """A sealed trajectory that its group does not need."""
    return MemberDropped(key=key, state=TrajectoryState.SURPLUS, reason=reason)


def incomplete_member(key: TrajectoryKey, reason: str) -> MemberDropped:
    """A sealed trajectory that no group can train."""
    return MemberDropped(key=key, state=TrajectoryState.INCOMPLETE, reason=reason)
