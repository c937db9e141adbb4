"""Why nobody gets data: typed reasons, from what a run looks like at one moment. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from turnstream.errors import WaitKind
from turnstream.store.tasks import PromptCounts
from turnstream_server.bus.budget import ByteBudget
from turnstream_server.bus.frontier import Frontier

LOW_PASS_RATE: Final = 0.5
"""Of the decided groups; below it, most of what generators do is for nothing."""


ReasonKind = WaitKind

Fact = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason.

    Attributes:
        sentence: for people.
        facts: what the sentence says, by name, for programs.
    """

    kind: ReasonKind
    sentence: str
    facts: Mapping[str, Fact]


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
        age_s: seconds since it was opened; None where no event tells, so it is an old one.
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
        max_planned_ahead: batches planned beyond the last stepped one.
        most_live_groups: groups that may be live after the last step.
        num_ready: groups that can be planned.
        num_waiting: groups that are not decided.
        groups: the oldest of these, a bounded number.
        refills: the oldest that nobody has taken, a bounded number.
        silent: generators that are gone, those with most trajectories first.
        untrained: (reason, trajectories) of what ended untrained, the most frequent first.
        newest_version: of the policy; None before the first.
        max_open_groups: groups that may be open at once; 0 means no limit.
        prompts: where those are that the run was given; None where it was not asked.
        budget: the bytes that are held, and may be.
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
    newest_version: int | None = None
    max_open_groups: int = 0
    prompts: PromptCounts | None = None
    budget: ByteBudget | None = None

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


def reasons(snapshot: RunSnapshot) -> tuple[Reason, ...]:
    """Why nobody gets data, the most important reason first; at least one.

    What is part of the day, such as a member that is being written, is a reason only while the
    trainer waits for groups.
    """
    if snapshot.is_over:
        return (_over(snapshot),)
    found = [
        *_of_services(snapshot),
        *_of_generators(snapshot),
        *_of_pass_rate(snapshot),
    ]
    if snapshot.budget is not None and not snapshot.frontier.is_closed:
        found += _of_budget(snapshot.budget)
    if snapshot.is_starved:
        found += [*_of_shortage(snapshot), *_of_prompts(snapshot), *_of_refills(snapshot)]
    for group in snapshot.groups:
        found += [
            each
            for each in _of_group(group)
            if snapshot.is_starved or each.kind is ReasonKind.MEMBER_LAPSED
        ]
    if not found:
        found = [_nothing_wrong(snapshot)]
    if snapshot.frontier.is_closed:
        found.append(_closed(snapshot))
    order = list(ReasonKind)
    return tuple(sorted(found, key=lambda reason: order.index(reason.kind)))


def _over(snapshot: RunSnapshot) -> Reason:
    stepped = snapshot.frontier.stepped
    sentence = f"run {snapshot.run} is closed and over: all {stepped} steps are stepped"
    return Reason(kind=ReasonKind.RUN_OVER, sentence=sentence, facts={"stepped": stepped})


def _closed(snapshot: RunSnapshot) -> Reason:
    return Reason(
        kind=ReasonKind.RUN_CLOSED,
        sentence=f"run {snapshot.run} is closed: it takes no new group",
        facts={"ready": snapshot.num_ready, "open": snapshot.num_waiting},
    )


def _nothing_wrong(snapshot: RunSnapshot) -> Reason:
    planned, stepped = snapshot.frontier.planned, snapshot.frontier.stepped
    state = f"step {stepped + 1} is offered"
    if not snapshot.has_offer:
        state = f"the {snapshot.num_ready} groups of step {planned + 1} are about to be planned"
    return Reason(
        kind=ReasonKind.NOTHING_WRONG,
        sentence=f"nothing is wrong: {state}",
        facts={"planned": planned, "stepped": stepped, "ready": snapshot.num_ready},
    )


def _of_services(snapshot: RunSnapshot) -> Iterator[Reason]:
    """Planner, trainer, and what generators may open after the trainer's last step."""
    frontier = snapshot.frontier
    if frontier.paused is not None:
        yield Reason(
            kind=ReasonKind.RUN_PAUSED,
            sentence=f"{frontier.pause}; no group begins, no batch is planned",
            facts={"reason": frontier.paused},
        )
    if not snapshot.planner or snapshot.planner_left_s <= 0:
        left_s = snapshot.planner_left_s
        since = f": the lease of {snapshot.planner} ended {-left_s:.0f} s ago"
        yield Reason(
            kind=ReasonKind.NO_PLANNER,
            sentence=f"no batcher plans the run{since if snapshot.planner else ''}",
            facts={"planner": snapshot.planner, "lease_left_s": left_s},
        )
    if frontier.planned >= frontier.stepped + 1 + snapshot.max_planned_ahead:
        step, awaited = frontier.planned + 1, frontier.stepped + 1
        trainer = f"trainer session {frontier.session_epoch} has it"
        if not frontier.session_epoch:
            trainer = "no trainer session has begun"
        yield Reason(
            kind=ReasonKind.TRAINER_NOT_STEPPED,
            sentence=f"step {step} is planned when step {awaited} is stepped; {trainer}",
            facts={"step": step, "awaited": awaited, "session_epoch": frontier.session_epoch},
        )
    if not frontier.is_closed:
        yield from _of_capacity(snapshot)


def _of_capacity(snapshot: RunSnapshot) -> Iterator[Reason]:
    """What lets no generator open a group."""
    frontier = snapshot.frontier
    most, live = snapshot.most_live_groups, frontier.num_live_groups
    most_open, num_open = snapshot.max_open_groups, frontier.num_open_groups
    if live >= most:
        yield Reason(
            kind=ReasonKind.OUT_OF_CAPACITY,
            sentence=f"generators wait for the trainer: {live} groups are live, {most} are allowed "
            f"after step {frontier.stepped}",
            facts={"live": live, "most": most, "stepped": frontier.stepped},
        )
    elif 0 < most_open <= num_open:
        yield Reason(
            kind=ReasonKind.OUT_OF_CAPACITY,
            sentence=f"generators wait for groups that are under way: {num_open} are open, "
            f"max_open_groups is {most_open}",
            facts={"open": num_open, "max_open_groups": most_open},
        )


def _of_budget(budget: ByteBudget) -> Iterator[Reason]:
    """Bytes that are held, where they hold anybody up."""
    facts: dict[str, Fact] = {
        "held": budget.held.total,
        "planned": budget.held.planned,
        "max_bytes": budget.max_bytes,
        "server_used": budget.server_used,
        "server_max": budget.server_max,
    }
    for kind, sentence in (
        (ReasonKind.BUDGET_TOO_SMALL, budget.why_too_small),
        (ReasonKind.OUT_OF_BYTES, budget.why_full),
    ):
        if sentence:
            yield Reason(kind=kind, sentence=sentence, facts=facts)


def _of_generators(snapshot: RunSnapshot) -> Iterator[Reason]:
    for each in snapshot.silent:
        yield Reason(
            kind=ReasonKind.GENERATOR_GONE,
            sentence=f"generator {each.writer} is gone: all {each.num_open} trajectories that it "
            f"holds have lapsed, the last {each.silent_s:.0f} s ago",
            facts={"writer": each.writer, "open": each.num_open, "silent_s": each.silent_s},
        )


def _of_pass_rate(snapshot: RunSnapshot) -> Iterator[Reason]:
    """Groups that were dropped, among those that were decided; a few say nothing."""
    frontier = snapshot.frontier
    dropped = frontier.num_opened_groups - frontier.num_live_groups
    decided = frontier.num_opened_groups - snapshot.num_waiting
    if decided < snapshot.batch_groups or decided - dropped >= LOW_PASS_RATE * decided:
        return
    shown = ", ".join(f"{number} x {reason}" for reason, number in snapshot.untrained)
    yield Reason(
        kind=ReasonKind.PASS_RATE_LOW,
        sentence=f"{dropped} of {decided} decided groups were dropped"
        + (f"; trajectories that ended untrained: {shown}" if shown else ""),
        facts={"dropped": dropped, "decided": decided, **dict(snapshot.untrained)},
    )


def _of_shortage(snapshot: RunSnapshot) -> Iterator[Reason]:
    """How many groups the next step lacks."""
    step, ready, needed = snapshot.frontier.planned + 1, snapshot.num_ready, snapshot.batch_groups
    facts: dict[str, Fact] = {"step": step, "ready": ready, "needed": needed}
    has = f"step {step}: {ready} of {needed} groups ready"
    if snapshot.num_waiting:
        yield Reason(
            kind=ReasonKind.TOO_FEW_READY,
            sentence=f"{has}, {snapshot.num_waiting} open",
            facts={**facts, "open": snapshot.num_waiting},
        )
        return
    version = snapshot.newest_version
    policy = "no policy version was announced"
    if version is not None:
        policy = f"the newest policy version is {version}"
    yield Reason(
        kind=ReasonKind.OUT_OF_DATA,
        sentence=f"{has}, and no generator has a group open; {policy}",
        facts={**facts, "newest_version": version},
    )


def _of_prompts(snapshot: RunSnapshot) -> Iterator[Reason]:
    prompts = snapshot.prompts
    if prompts is not None and prompts.is_exhausted and not snapshot.frontier.is_closed:
        yield Reason(
            kind=ReasonKind.PROMPTS_EXHAUSTED,
            sentence=f"all {prompts.num_added} prompts of the run are done, "
            f"{prompts.num_filtered} of them filtered: add others, or close the run",
            facts={"prompts": prompts.num_added, "filtered": prompts.num_filtered},
        )


def _of_refills(snapshot: RunSnapshot) -> Iterator[Reason]:
    for refill in snapshot.refills:
        yield Reason(
            kind=ReasonKind.REFILL_OPEN,
            sentence=f"attempt {refill.attempt} of sample {refill.sample} of group "
            f"{refill.group_id} was granted {refill.since_s:.0f} s ago, and no generator takes it",
            facts={
                "group": refill.group_id,
                "sample": refill.sample,
                "attempt": refill.attempt,
                "since_s": refill.since_s,
            },
        )


def _of_group(group: WaitingGroup) -> Iterator[Reason]:
    """What one group waits for, member by member."""
    head = f"group {group.group_id} ({group.num_sealed} of {group.num_needed} members)"
    until = _until(group.deadline_left_s)
    facts: dict[str, Fact] = {"group": group.group_id, "age_s": group.age_s}
    for member in group.open_members:
        left_s = member.lease_left_s
        lease = f"lease renewed, {left_s:.0f} s left"
        if left_s <= 0:
            lease = f"lease lapsed {-left_s:.0f} s ago"
        yield Reason(
            kind=ReasonKind.MEMBER_OPEN if left_s > 0 else ReasonKind.MEMBER_LAPSED,
            sentence=f"{head} waits for sample {member.sample} of generator {member.writer}"
            f"{_for(group.age_s)}: {lease}{until}",
            facts={
                **facts,
                "sample": member.sample,
                "attempt": member.attempt,
                "writer": member.writer,
                "lease_left_s": left_s,
            },
        )
    for each in group.awaited:
        yield Reason(
            kind=ReasonKind.REWARD_AWAITED,
            sentence=f"{head} waits for the reward of sample {each.sample}, which is sealed"
            f"{_for(each.since_s)}{_until(each.deadline_left_s)}",
            facts={
                **facts,
                "sample": each.sample,
                "attempt": each.attempt,
                "since_s": each.since_s,
            },
        )
    for sample in group.not_begun:
        yield Reason(
            kind=ReasonKind.MEMBER_NOT_BEGUN,
            sentence=f"{head} waits for sample {sample}{_for(group.age_s)}: no generator has begun "
            f"it{until}",
            facts={**facts, "sample": sample},
        )


def _for(seconds: float | None) -> str:
    """How long something has lasted.

    >>> _for(12.3), _for(None)
    (' for 12 s', ' for longer than events are kept')
    """
    return " for longer than events are kept" if seconds is None else f" for {seconds:.0f} s"


def _until(seconds: float | None) -> str:
    """When a deadline comes.

    >>> _until(4.2), _until(-3), _until(None)
    ('; its deadline is in 4 s', '; its deadline was 3 s ago', '')
    """
    if seconds is None:
        return ""
    when = f"is in {seconds:.0f} s" if seconds > 0 else f"was {-seconds:.0f} s ago"
    return f"; its deadline {when}"
