"""The state of a run at one time, from which the reasons for waiting follow. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from turnstream.store.run.tasks import PromptCounts
from turnstream.store.waits.pass_rate import RecentGroups, recent_groups
from turnstream.store.waits.wait_durations import NOT_NOTED, Lasting
from turnstream_server.bus.admin.dead_letters import KeptDeadLetters
from turnstream_server.bus.core.frontier import Frontier
from turnstream_server.bus.queries.budget import ByteBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMember:
    """A trajectory that is not sealed.

    Attributes:
        writer: owner of its lease.
        lease_left_s: time left of its lease; 0 or below after it has lapsed.
    """

    sample: int
    attempt: int
    writer: str
    lease_left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedReward:
    """A sealed trajectory whose reward was not posted.

    Attributes:
        since_s: seconds since it was sealed; None if its event is gone.
        deadline_left_s: until its reward deadline; None without one.
    """

    sample: int
    attempt: int
    since_s: float | None
    deadline_left_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingGroup:
    """An undecided group with a limited number of its members.

    Attributes:
        age_s: seconds since it was opened; None if unknown.
        num_sealed: samples with a member that is sealed, and rewarded.
        deadline_left_s: until its deadline; None without one.
        open_members: members that are being written.
        awaited: members without their reward.
        not_begun: samples that no generator has taken.
    """

    group_id: str
    age_s: float | None
    num_sealed: int
    num_needed: int
    deadline_left_s: float | None = None
    open_members: tuple[OpenMember, ...] = ()
    awaited: tuple[AwaitedReward, ...] = ()
    not_begun: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRefill:
    """A granted attempt that no generator has taken.

    Attributes:
        since_s: seconds since it was granted.
    """

    group_id: str
    sample: int
    attempt: int
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentWriter:
    """A generator all of whose open trajectories have lapsed.

    Attributes:
        num_open: trajectories that it holds.
        silent_s: seconds since the last of its leases ended.
    """

    writer: str
    num_open: int
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The state of a run at one time.

    Attributes:
        planner: name of the batcher that planned last; empty before the first, or after it has
            stopped.
        planner_left_s: time left of its lease; 0 or below after its end.
        batch_groups: groups of one step.
        max_planned_ahead: batches planned beyond the next step.
        most_live_groups: groups that may be live after the last step.
        num_ready: groups that can be planned.
        num_waiting: groups that are not decided.
        groups: the oldest undecided groups, a limited number.
        refills: the oldest untaken refills, a limited number.
        silent: generators that are gone, those with most trajectories first.
        untrained: (reason, trajectories) that ended untrained, the most frequent first.
        num_unsealed: trajectories whose block ended without a seal.
        newest_version: newest policy version; None before the first.
        max_open_groups: groups that may be open at once; 0 means no limit.
        prompts: counts of the run's prompts; None if it has none.
        budget: the bytes of the run, and their limits.
        store_trouble: why the store takes no writes; empty if it does.
        planning_trouble, release_trouble: why the planner cannot plan or release; empty if it can.
        lasting: durations of the current state.
        behind: ranks that have not asked for the next step.
        dead: the dead letters; None if there are none.
    """

    run: str
    frontier: Frontier
    planner: str
    planner_left_s: float
    batch_groups: int
    max_planned_ahead: int
    most_live_groups: int
    num_ready: int
    num_waiting: int
    groups: tuple[WaitingGroup, ...] = ()
    refills: tuple[OpenRefill, ...] = ()
    silent: tuple[SilentWriter, ...] = ()
    untrained: tuple[tuple[str, int], ...] = ()
    num_unsealed: int = 0
    newest_version: int | None = None
    max_open_groups: int = 0
    prompts: PromptCounts | None = None
    budget: ByteBudget | None = None
    store_trouble: str = ""
    planning_trouble: str = ""
    release_trouble: str = ""
    lasting: Lasting = NOT_NOTED
    behind: tuple[int, ...] = ()
    dead: KeptDeadLetters | None = None

    @property
    def recent(self) -> RecentGroups:
        """The groups that were decided lately."""
        frontier = self.frontier
        return recent_groups(
            frontier.at_plans,
            num_dropped=frontier.num_opened_groups - frontier.num_live_groups,
            num_in_batches=frontier.num_planned_groups,
            num_ready=self.num_ready,
        )

    @property
    def has_offer(self) -> bool:
        """Whether a batch is planned that the trainer has not stepped."""
        return self.frontier.planned > self.frontier.stepped

    @property
    def is_due(self) -> bool:
        """Whether the next batch has all its groups."""
        ends_short = self.frontier.is_closed and self.frontier.leftover == "short"
        is_final = ends_short and not self.num_waiting and self.num_ready > 0
        return is_final or self.num_ready >= self.batch_groups

    @property
    def is_starved(self) -> bool:
        """Whether the trainer waits for groups."""
        return not (self.has_offer or self.is_due)

    @property
    def is_over(self) -> bool:
        """Whether nothing will ever happen again."""
        left = self.num_waiting or self.num_ready
        is_finished = self.frontier.is_finished or (self.frontier.is_closed and not left)
        return is_finished and not self.has_offer
