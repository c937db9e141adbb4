"""The state of a fold: its groups, the samples of each, and which of these can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.values import GREEDY_SAMPLE
from turnstream.batching.fold.decisions import (
    Decision,
    GroupCut,
    GroupDropped,
    ReadyGroup,
    RefillWanted,
    incomplete_member,
    surplus_member,
)
from turnstream.batching.fold.evals import EvalResults
from turnstream.batching.scoring.filters import (
    chain_problem,
    is_compared,
    is_greedy,
    length_problem,
    status_problem,
)
from turnstream.batching.scoring.rewards import reward_problem
from turnstream.types import (
    GroupOpened,
    Leftover,
    Purpose,
    SealedTrajectory,
    TrajectoryKey,
    TrajectoryState,
)
from turnstream.types.names import few_of


@dataclass(slots=True)
class GroupMembers:
    """The samples of one group; a sample has one member at most, its first valid attempt.

    Attributes:
        opened_by: id of the event that opened the group.
        members: sample -> its valid, sealed attempt.
        awaiting: attempts that are sealed and wait for their reward.
        ended: samples of which an attempt ended without becoming a member.
        wanted: number -> sample of the refills that were asked for and not granted yet.
        granted: attempts of granted refills that have not ended.
        last_fired: `num_refills` of the last deadline that fired; -1 before the first.
        seen: attempts with a recorded end.
        is_cut: whether the group ignores unsealed samples, until a refill opens it again.
    """

    opened: GroupOpened
    opened_by: str
    members: dict[int, SealedTrajectory] = field(default_factory=dict[int, SealedTrajectory])
    awaiting: dict[TrajectoryKey, SealedTrajectory] = field(
        default_factory=dict[TrajectoryKey, SealedTrajectory]
    )
    ended: set[int] = field(default_factory=set[int])
    wanted: dict[int, int] = field(default_factory=dict[int, int])
    granted: set[TrajectoryKey] = field(default_factory=set[TrajectoryKey])
    num_asked: int = 0
    num_granted: int = 0
    last_fired: int = -1
    seen: set[TrajectoryKey] = field(default_factory=set[TrajectoryKey])
    is_cut: bool = False

    @property
    def is_evaluation(self) -> bool:
        """Whether the group is never trained."""
        return self.opened.purpose is Purpose.EVAL

    @property
    def is_short(self) -> bool:
        """Whether it has fewer members than it needs."""
        return len(self.members) < self.opened.num_needed

    def has_enough(self, config: BatchingConfig) -> bool:
        """Return whether as many members as it needs are compared, a greedy sample among them."""
        is_short = self.is_short or self._num_compared(config) < self.opened.num_needed
        return not is_short and not self.awaits_greedy(config)

    def has_all(self) -> bool:
        """Return whether no further sample can get a member."""
        num_known = len(self.members) + len(self.ended)  # a sample can be in both
        return num_known >= self.opened.num_samples and not self.pending()

    def _num_compared(self, config: BatchingConfig) -> int:
        if config.masked_reward == "keep":
            return len(self.members)
        return sum(is_compared(member, config) for member in self.members.values())

    def awaits_greedy(self, config: BatchingConfig) -> bool:
        """Whether the greedy sample, or one to compare with it, is missing."""
        return config.has_greedy_sample and bool(self.comparison_problem(config))

    def compared(self, config: BatchingConfig) -> list[SealedTrajectory]:
        """Return the members whose rewards are compared, in order of their samples."""
        return [member for member in self.ordered if is_compared(member, config)]

    def comparison_problem(self, config: BatchingConfig) -> str:
        """Return why its members cannot be compared; empty if they can."""
        compared = self.compared(config)
        needed = 2 if config.has_greedy_sample else min(2, self.opened.num_needed)
        if config.has_greedy_sample and not any(is_greedy(member, config) for member in compared):
            return f"no valid greedy sample {GREEDY_SAMPLE} to compare with"
        if len(compared) < needed:
            return f"{len(compared)} valid members, and {needed} are needed to compare"
        return ""

    @property
    def ordered(self) -> tuple[SealedTrajectory, ...]:
        """The members in order of their samples."""
        return tuple(member for _, member in sorted(self.members.items()))

    def as_ready(self, *, completed_by: str) -> ReadyGroup:
        """Return the group as it can be planned since this event."""
        return ReadyGroup(
            group_id=self.opened.group_id,
            prompt_uid=self.opened.prompt_uid,
            members=self.ordered,
            completed_by=completed_by,
            opened_by=self.opened_by,
        )

    def surplus_reason(self, key: TrajectoryKey) -> str:
        """Return why the group has no place for this attempt; empty if it has."""
        if not self.is_sample(key.sample):
            return f"sample {key.sample} of {self.opened.num_samples}"
        if key.sample in self.members:
            return f"sample {key.sample} was sealed by another attempt before"
        return ""

    def is_sample(self, number: int) -> bool:
        """Whether the group was declared with this sample."""
        return 0 <= number < self.opened.num_samples

    def pending(self) -> list[int]:
        """Return the samples without a member that may still get one, in order.

        A sample whose attempt ended counts only where a refill of it was asked for, or an attempt
        of it waits for its reward.
        """
        trying = {*self.wanted.values(), *(key.sample for key in (*self.awaiting, *self.granted))}
        return [
            sample
            for sample in range(self.opened.num_samples)
            if sample not in self.members and (sample not in self.ended or sample in trying)
        ]

    def end_attempt(self, key: TrajectoryKey) -> None:
        """Record that an attempt ended and is no member."""
        self.seen.add(key)
        self.granted.discard(key)
        if key.sample not in self.members:
            self.ended.add(key.sample)

    def remove_member(self, key: TrajectoryKey) -> bool:
        """Remove an attempt that ended; return whether it was a member."""
        member = self.members.get(key.sample)
        if member is None or member.key != key:
            return False
        del self.members[key.sample]
        self.end_attempt(key)
        return True

    @property
    def sealed(self) -> tuple[SealedTrajectory, ...]:
        """The members, and the attempts that wait for their reward."""
        return (*self.ordered, *self.awaiting.values())

    def remove_unfit(
        self, attempts: Iterable[SealedTrajectory], config: BatchingConfig
    ) -> list[Decision]:
        """Remove those of these attempts that this configuration cannot train."""
        dropped: list[Decision] = []
        for sealed in attempts:
            key, problem = sealed.key, problem_of(sealed, config)
            if problem:
                if self.awaiting.pop(key, None) is None:
                    del self.members[key.sample]
                self.end_attempt(key)
                dropped.append(incomplete_member(key, f"sample {key.sample} {problem}"))
        return dropped

    @property
    def has_more(self) -> bool:
        """Whether a sample, a reward or a refill of it is still to come."""
        return bool(self.pending() or self.awaiting or self.wanted or self.granted)

    def cut(self) -> list[Decision]:
        """Wait for no further sample: all that are not sealed are surplus."""
        reason = f"its group was decided by {len(self.members)} of {self.opened.num_samples}"
        surplus: list[Decision] = [surplus_member(key, reason) for key in self.awaiting]
        self.ended.update(self.pending())
        self.awaiting.clear()
        self.wanted.clear()
        self.granted.clear()
        self.is_cut = True
        group_id = self.opened.group_id
        return [*surplus, GroupCut(group_id=group_id, reason=reason, num_granted=self.num_granted)]

    def dropped(self, state: TrajectoryState, reason: str) -> GroupDropped:
        """Return the decision that ends all its sealed trajectories in this state."""
        keys = sorted(each.key for each in self.sealed)
        return GroupDropped(
            group_id=self.opened.group_id, state=state, reason=reason, keys=tuple(keys)
        )

    def refill_lost(self, config: BatchingConfig) -> list[RefillWanted]:
        """Ask for what is missing for certain: more samples have ended than can be spared.

        The greedy sample comes first, and can never be spared.
        """
        pending = self.pending()
        num_missing = self.opened.num_needed - self._num_compared(config) - len(pending)
        lost = sorted(self.ended - set(self.members) - set(pending))
        least = int(config.has_greedy_sample and GREEDY_SAMPLE in lost)
        return self._ask(lost[: max(least, num_missing)], config.max_refills)

    def refill_overdue(self, config: BatchingConfig) -> list[RefillWanted]:
        """Request missing members after the deadline: ended samples first, then hanging ones.

        The greedy sample comes before all others.
        """
        asked_for = {*self.members, *self.wanted.values()}
        overdue = [s for s in range(self.opened.num_samples) if s not in asked_for]
        first = GREEDY_SAMPLE if config.has_greedy_sample else None
        overdue.sort(key=lambda sample: (sample != first, sample not in self.ended))
        num_missing = self.opened.num_needed - self._num_compared(config) - len(self.wanted)
        return self._ask(overdue[: max(int(first in overdue), num_missing)], config.max_refills)

    def _ask(self, samples: Iterable[int], max_refills: int) -> list[RefillWanted]:
        asked: list[RefillWanted] = []
        for sample in samples:
            if self.num_asked >= max_refills:
                break
            self.num_asked += 1
            self.wanted[self.num_asked] = sample
            key = TrajectoryKey(self.opened.group_id, sample, self._next_attempt(sample))
            asked.append(
                RefillWanted(key=key, prompt_uid=self.opened.prompt_uid, number=self.num_asked)
            )
        return asked

    def _next_attempt(self, sample: int) -> int:
        known = (key.attempt for key in (*self.seen, *self.granted) if key.sample == sample)
        return 1 + max(known, default=0)

    def shortage(self) -> str:
        """Return the missing part, as "2 of 4 members after 1 refills, none of sample 1, 3"."""
        samples = range(self.opened.num_samples)
        lacking = few_of([sample for sample in samples if sample not in self.members])
        refills = f" after {self.num_asked} refills" if self.num_asked else ""
        needed = self.opened.num_needed
        return f"{len(self.members)} of {needed} members{refills}, none of sample {lacking}"


@dataclass(slots=True, kw_only=True)
class FoldState:
    """Content of a `RunFold`, by the names under which a snapshot stores it.

    Attributes:
        groups: open and ready groups and evaluations, oldest first.
        ready: decided groups that no plan has taken, in order of completion, each with the id of
            the event that made it what it is.
        decided: attempts that the fold has seen of each finished group.
        closed: whether the run takes no new group.
        leftover: treatment of the groups that make no whole batch of a closed run.
    """

    groups: dict[str, GroupMembers] = field(default_factory=dict[str, GroupMembers])
    ready: dict[str, str] = field(default_factory=dict[str, str])
    decided: dict[str, set[TrajectoryKey]] = field(default_factory=dict[str, set[TrajectoryKey]])
    evals: EvalResults = field(default_factory=EvalResults)
    closed: bool = False
    leftover: Leftover = "short"

    @property
    def ready_groups(self) -> list[GroupMembers]:
        """Decided groups that no plan has taken, in order of completion."""
        return [self.groups[group_id] for group_id in self.ready]

    @property
    def undecided(self) -> list[str]:
        """Groups and evaluations that were opened and are not decided, oldest first."""
        return [group_id for group_id in self.groups if group_id not in self.ready]


def problem_of(sealed: SealedTrajectory, config: BatchingConfig) -> str:
    """Return why a sealed trajectory can be no member of its group; empty if it can."""
    if not sealed.turns:
        return status_problem(sealed, config) or "has no turn"
    if sealed.awaits_reward:
        return status_problem(sealed, config)
    problem = status_problem(sealed, config) or reward_problem(sealed, config)
    return problem or chain_problem(sealed, config) or length_problem(sealed, config)
