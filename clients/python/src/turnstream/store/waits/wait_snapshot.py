"""The state of a run at one time, from which the reasons for waiting follow. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from turnstream.batching.config import BatchingConfig
from turnstream.store.client.fullness import NO_BYTES, Bytes
from turnstream.store.run.tasks import NO_PROMPTS, PromptCounts
from turnstream.types import TrajectoryKey

MAX_NAMED: Final = 8
"""Trajectories, generators, groups or refills that are named."""


class MemberState(StrEnum):
    """State of a sample that a group waits for."""

    LAPSED = "lapsed"
    """Its lease has lapsed."""
    UNREWARDED = "unrewarded"
    """It is sealed, and its reward was not posted."""
    GRANTED = "granted"
    """It may be tried again, and no generator has taken it."""
    NOT_STARTED = "not_started"
    OPEN = "open"
    """It is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMember:
    """A sample that an undecided group waits for.

    Attributes:
        writer: owner of its lease, and `lease_left_s` the time left of it; None without a lease.
        since_s: seconds since its group was opened, or it was sealed or granted; None if unknown.
        deadline_left_s: until the deadline of its group or reward; None without one.
        num_sealed, num_needed: samples that are sealed and rewarded, and that the group needs;
            None if not scanned.
    """

    key: TrajectoryKey
    state: MemberState
    writer: str | None = None
    lease_left_s: float | None = None
    since_s: float | None = None
    deadline_left_s: float | None = None
    num_sealed: int | None = None
    num_needed: int | None = None

    @property
    def has_lapsed(self) -> bool:
        """Whether its lease has lapsed."""
        return self.state is MemberState.LAPSED


def open_member(key: TrajectoryKey, writer: str, *, left_ms: float) -> WaitingMember:
    """Return a sample that has a lease with so much time left."""
    state = MemberState.OPEN if left_ms > 0 else MemberState.LAPSED
    return WaitingMember(key=key, state=state, writer=writer, lease_left_s=left_ms / 1_000)


class LapsedWriter(NamedTuple):
    """A generator all of whose open trajectories have lapsed, the last `silent_s` ago."""

    writer: str
    num_open: int
    silent_s: float


class KeptDeadLetters(NamedTuple):
    """The dead letters of a run: their numbers, and the name and reason of the newest."""

    trajectories: int
    events: int
    newest: str
    reason: str


class Durations(NamedTuple):
    """Durations in seconds; None if the start was not recorded.

    Attributes:
        trainer_s: since the trainer session can have the step after the last stepped one.
        step_s: since that step is the next one that the run needs.
    """

    trainer_s: float | None = None
    step_s: float | None = None
    opened_s: float | None = None


NO_DURATIONS: Final = Durations()


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSnapshot:
    """The state of a run at one time.

    One script reads it. A server that scans the ledger, too, replaces the counts and names of
    groups by exact ones, and sets the last five attributes. See store/client/keys.py for the
    numbers that are stored.

    Attributes:
        announced: step of the newest weights that the session announced; None before its first.
        num_live: groups that were opened and not dropped.
        num_open: live groups that are not decided.
        session_epoch: epoch of the active trainer session; 0 without one.
        is_finished: the run is closed, and no batch follows `planned`.
        leftover: see RunClosed; only of a closed run.
        paused: reason of the pause; None if the run is not paused.
        damage: step and sentence of the last payload damage that a rank met.
        planner: name of the batcher that planned last; empty before the first.
        planner_left_s: time left of its lease; 0 or below after its end.
        planning_trouble, release_trouble: why it cannot plan or release; empty if it can.
        store_trouble: why the store takes no writes; empty if it does.
        budget: bytes of the run and of the server; `needed` is that of a trajectory.
        num_refills: granted attempts that no generator has taken.
        untrained: (reason, trajectories) that ended untrained.
        members: samples that are waited for, a limited number.
        behind: ranks that have not asked for the step to train.
        num_ready: groups that are decided, and in no batch.
        num_waiting: groups that are not decided.
        num_unsealed: trajectories whose block ended without a seal.
        unseen_by: the observers that have not seen the oldest committed step.
        num_flat_groups: groups of the newest batch if all its advantages are 0; else 0.
    """

    run: str
    config: BatchingConfig
    stepped: int = 0
    announced: int | None = None
    planned: int = 0
    planned_groups: int = 0
    released: int = 0
    num_live: int = 0
    num_open: int = 0
    num_opened: int = 0
    at_plans: str = ""
    session_epoch: int = 0
    is_closed: bool = False
    is_finished: bool = False
    leftover: str = "short"
    paused: str | None = None
    damage: tuple[int, str] | None = None
    planner: str = ""
    planner_left_s: float = 0.0
    planning_trouble: str = ""
    release_trouble: str = ""
    store_trouble: str = ""
    budget: Bytes = NO_BYTES
    prompts: PromptCounts = NO_PROMPTS
    num_refills: int = 0
    newest_version: int | None = None
    untrained: tuple[tuple[str, int], ...] = ()
    members: tuple[WaitingMember, ...] = ()
    lapsed_writers: tuple[LapsedWriter, ...] = ()
    durations: Durations = NO_DURATIONS
    behind: tuple[int, ...] = ()
    num_ready: int = 0
    num_waiting: int = 0
    is_scanned: bool = False
    num_unsealed: int = 0
    unseen_by: str = ""
    num_flat_groups: int = 0
    dead: KeptDeadLetters | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next batch has all its groups."""
        ends_short = self.is_closed and self.leftover == "short"
        is_final = ends_short and not self.num_waiting and self.num_ready > 0
        return is_final or self.num_ready >= self.config.batch_groups

    @property
    def is_starved(self) -> bool:
        """Whether the trainer waits for groups."""
        return self.planned <= self.stepped and not self.is_due

    @property
    def has_ended(self) -> bool:
        """Whether the run is closed and has nothing left to train."""
        is_finished = self.is_finished or not (self.num_waiting or self.num_ready)
        return self.is_closed and is_finished and self.planned <= self.stepped

    @property
    def waits_for_members(self) -> bool:
        """Whether the trainer, or the generator that asks, waits for groups that are open."""
        is_full = 0 < self.config.max_open_groups <= self.num_open
        return self.is_starved or (not self.is_scanned and (is_full or self.prompts.num_given > 0))


def lapsed_writers(members: Iterable[WaitingMember]) -> tuple[LapsedWriter, ...]:
    """Return the writers of whom every lease has lapsed, those with most members first."""
    leases: dict[str, list[float]] = {}
    for each in members:
        if each.writer is not None:
            leases.setdefault(each.writer, []).append(each.lease_left_s or 0.0)
    lapsed = [
        LapsedWriter(writer, num_open=len(left), silent_s=-max(left))
        for writer, left in leases.items()
        if max(left) <= 0
    ]
    return tuple(sorted(lapsed, key=lambda each: (-each.num_open, each.writer))[:MAX_NAMED])
