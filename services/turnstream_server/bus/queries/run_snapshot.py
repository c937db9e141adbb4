"""What a run looks like at one moment to somebody who waits for it. No I/O."""

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
        writer: who holds it.
        lease_left_s: of its lease; 0 or below where it has lapsed, by so much.
    """

    sample: int
    attempt: int
    writer: str
    lease_left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedReward:
    """A sealed trajectory whose reward was not posted.

    Attributes:
        since_s: seconds since it was sealed; None where no event tells.
        deadline_left_s: until the run goes on without it; None without a deadline.
    """

    sample: int
    attempt: int
    since_s: float | None
    deadline_left_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingGroup:
    """A group that is not decided; of its members a bounded number is named.

    Attributes:
        age_s: seconds since it was opened; None where neither an event nor the planner's snapshot
            tells.
        num_sealed: samples with a member that is sealed, and rewarded.
        deadline_left_s: until its deadline fires; None without one.
        open_members: those that are being written.
        awaited: those that wait for their reward.
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
    """An attempt that was granted, and that nobody has begun.

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
    """What the reasons follow from.

    Attributes:
        planner: name of the batcher that planned last; empty if none ever did, or it has left.
        planner_left_s: of its lease; 0 or below where it has ended.
        batch_groups: groups of one step.
        max_planned_ahead: batches planned beyond the one that is to be stepped next.
        most_live_groups: groups that may be live after the last step.
        num_ready: groups that can be planned.
        num_waiting: groups that are not decided.
        groups: the oldest of these, a bounded number.
        refills: the oldest that nobody has taken, a bounded number.
        silent: generators that are gone, those with most trajectories first.
        untrained: (reason, trajectories) of what ended untrained, the most frequent first.
        num_unsealed: trajectories that were left without a seal.
        newest_version: of the policy; None before the first.
        max_open_groups: groups that may be open at once; 0 means no limit.
        prompts: where those are that the run was given; None where it was not asked.
        budget: the bytes that are held, and may be.
        store_trouble: why the store takes no writes; empty where it does.
        planning_trouble, release_trouble: what keeps the planner from planning, and from letting
            go of what is over; empty where nothing does.
        lasting: for how long it is so.
        behind: ranks that have not asked for the step that is to be stepped next.
        dead: the dead letters; None where none is kept.
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
