"""Reasons why a run waits, from its state at one time. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from turnstream.errors import WaitKind
from turnstream.store.waits.wait_durations import for_so_long, last_opened, named_ranks, not_asked
from turnstream_server.bus.admin.dead_letters import KeptDeadLetters
from turnstream_server.bus.planning.replans import how_to_go_on
from turnstream_server.bus.queries.budget import ByteBudget
from turnstream_server.bus.queries.run_snapshot import RunSnapshot, WaitingGroup

ReasonKind = WaitKind

Fact = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason.

    Attributes:
        sentence: for people.
        facts: the values in the sentence by name, for programs.
    """

    kind: ReasonKind
    sentence: str
    facts: Mapping[str, Fact]


def reasons(snapshot: RunSnapshot) -> tuple[Reason, ...]:
    """Return why a run waits, the most important reason first; at least one.

    Normal states, such as an open member, are reasons only while the trainer waits for groups.
    """
    if snapshot.is_over:
        return (_over(snapshot),)
    found = [
        *_of_services(snapshot),
        *_of_generators(snapshot),
        *_of_pass_rate(snapshot),
    ]
    if snapshot.budget is not None:
        found += _of_full_store(snapshot.budget, snapshot)
    is_full = any(reason.kind is ReasonKind.STORE_FULL for reason in found)
    if snapshot.budget is not None and not snapshot.frontier.is_closed and not is_full:
        found += _of_budget(snapshot.budget, is_urgent=snapshot.is_starved)
    if snapshot.is_starved:
        found += [*_of_shortage(snapshot), *_of_prompts(snapshot), *_of_refills(snapshot)]
        found += _of_unsealed(snapshot)
    for group in snapshot.groups:
        found += [
            each
            for each in _of_group(group)
            if snapshot.is_starved or each.kind is ReasonKind.MEMBER_LAPSED
        ]
    if not found:
        found = [_nothing_wrong(snapshot)]
    if snapshot.dead is not None:
        found.append(_of_dead_letters(snapshot.run, snapshot.dead))
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


def _of_dead_letters(run: str, dead: KeptDeadLetters) -> Reason:
    return Reason(
        kind=ReasonKind.DEAD_LETTERS,
        sentence=(
            f"dead letters that are kept: {dead.num_trajectories} of trajectories, "
            f"{dead.num_events} of events; the newest is {dead.newest}: {dead.reason}; "
            f"`turnstream dead list {run}` lists them"
        ),
        facts={
            "trajectories": dead.num_trajectories,
            "events": dead.num_events,
            "newest": dead.newest,
            "reason": dead.reason,
        },
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
    if snapshot.store_trouble:
        yield Reason(
            kind=ReasonKind.STORE_REFUSES_WRITES,
            sentence=f"{snapshot.store_trouble}; nothing new is acknowledged",
            facts={"reason": snapshot.store_trouble},
        )
    yield from _of_damage(snapshot)
    if not snapshot.planner or snapshot.planner_left_s <= 0:
        left_s = snapshot.planner_left_s
        since = f": the lease of {snapshot.planner} ended {-left_s:.0f} s ago"
        yield Reason(
            kind=ReasonKind.NO_PLANNER,
            sentence=f"no batcher plans the run{since if snapshot.planner else ''}",
            facts={"planner": snapshot.planner, "lease_left_s": left_s},
        )
    for kind, what, trouble in (
        (ReasonKind.PLANNING_FAILS, "plan the run", snapshot.planning_trouble),
        (ReasonKind.RELEASE_FAILS, "let go of what is over", snapshot.release_trouble),
    ):
        if trouble:
            yield Reason(
                kind=kind,
                sentence=f"batcher {snapshot.planner} cannot {what}: {trouble}",
                facts={"planner": snapshot.planner, "trouble": trouble},
            )
    if frontier.planned >= frontier.stepped + 1 + snapshot.max_planned_ahead:
        yield _of_trainer(snapshot)
    if not frontier.is_closed:
        yield from _of_capacity(snapshot)


def _of_trainer(snapshot: RunSnapshot) -> Reason:
    """Return who has the awaited step, and which ranks have not asked for it."""
    frontier, since_s = snapshot.frontier, snapshot.lasting.trainer_s
    step, awaited = frontier.planned + 1, frontier.stepped + 1
    trainer = f"trainer session {frontier.session_epoch} has it"
    if not frontier.has_session:
        trainer = "no trainer session has begun"
    return Reason(
        kind=ReasonKind.TRAINER_NOT_STEPPED,
        sentence=f"step {step} is planned when step {awaited} is stepped; {trainer}"
        f"{for_so_long(since_s)}{not_asked(snapshot.behind)}",
        facts={
            "step": step,
            "awaited": awaited,
            "session_epoch": frontier.session_epoch,
            "since_s": since_s,
            "behind": named_ranks(snapshot.behind) or None,
        },
    )


def _of_damage(snapshot: RunSnapshot) -> Iterator[Reason]:
    """Yield damage that a rank met, until the step is stepped or planned again."""
    frontier, damage = snapshot.frontier, snapshot.frontier.damage
    if damage is not None and frontier.stepped < damage.step <= frontier.planned:
        yield Reason(
            kind=ReasonKind.PAYLOAD_DAMAGED,
            sentence=f"{damage.sentence}; {how_to_go_on(snapshot.run)}",
            facts={"step": damage.step, "damage": damage.sentence},
        )


def _of_capacity(snapshot: RunSnapshot) -> Iterator[Reason]:
    """Yield why no generator may open a group."""
    frontier = snapshot.frontier
    most, live = snapshot.most_live_groups, frontier.num_live_groups
    most_open, num_open = snapshot.max_open_groups, frontier.num_open_groups
    since_s = snapshot.lasting.opened_s
    if live >= most:
        yield Reason(
            kind=ReasonKind.OUT_OF_CAPACITY,
            sentence=f"generators wait for the trainer: {live} groups are live, {most} are allowed "
            f"after step {frontier.stepped}{last_opened(since_s)}",
            facts={"live": live, "most": most, "stepped": frontier.stepped, "since_s": since_s},
        )
    elif 0 < most_open <= num_open:
        yield Reason(
            kind=ReasonKind.OUT_OF_CAPACITY,
            sentence=f"generators wait for groups that are under way: {num_open} are open, "
            f"max_open_groups is {most_open}{last_opened(since_s)}",
            facts={"open": num_open, "max_open_groups": most_open, "since_s": since_s},
        )


def _of_full_store(budget: ByteBudget, snapshot: RunSnapshot) -> Iterator[Reason]:
    """A server that refuses writes, or open trajectories that leave no room for another group."""
    bytes_ = budget.bytes
    if snapshot.frontier.is_closed and not bytes_.refuses_writes:
        return
    if sentence := bytes_.why_full(is_urgent=snapshot.is_starved):
        facts: dict[str, Fact] = {
            "server_used": bytes_.used,
            "server_max": bytes_.allowed,
            "max_bytes": bytes_.max_bytes,
            "reserved": bytes_.reserved,
            "stored": bytes_.stored,
            "planned": bytes_.planned,
        }
        yield Reason(kind=ReasonKind.STORE_FULL, sentence=sentence, facts=facts)


def _of_budget(budget: ByteBudget, *, is_urgent: bool) -> Iterator[Reason]:
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
        (ReasonKind.OUT_OF_BYTES, budget.why_full(is_urgent=is_urgent)),
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
    """Groups that were dropped, among those that were decided lately; a few say nothing."""
    recent = snapshot.recent
    if why := recent.why_low(least=snapshot.batch_groups):
        shown = ", ".join(f"{number} x {reason}" for reason, number in snapshot.untrained)
        yield Reason(
            kind=ReasonKind.PASS_RATE_LOW,
            sentence=why
            + (f"; trajectories that ended untrained, of the whole run: {shown}" if shown else ""),
            facts={
                "dropped": recent.num_dropped,
                "decided": recent.num_decided,
                "since_step": recent.since_step,
                **dict(snapshot.untrained),
            },
        )


def _of_unsealed(snapshot: RunSnapshot) -> Iterator[Reason]:
    """Trajectories that a generator left without `seal`."""
    number = snapshot.num_unsealed
    if number:
        yield Reason(
            kind=ReasonKind.MEMBER_UNSEALED,
            sentence=f"{number} trajectories were left without a seal and are not trained: the "
            "generator has to call seal(reward=...) before the block of a trajectory ends",
            facts={"trajectories": number},
        )


def _of_shortage(snapshot: RunSnapshot) -> Iterator[Reason]:
    """How many groups the next step lacks."""
    step, ready, needed = snapshot.frontier.planned + 1, snapshot.num_ready, snapshot.batch_groups
    since_s, opened_s = snapshot.lasting.step_s, snapshot.lasting.opened_s
    facts: dict[str, Fact] = {"step": step, "ready": ready, "needed": needed, "since_s": since_s}
    waiting = for_so_long(since_s, verb=" waits")
    has = f"step {step}{waiting}: {ready} of {needed} groups ready"
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
        sentence=f"{has}, and no generator has a group open{last_opened(opened_s)}; {policy}",
        facts={**facts, "opened_s": opened_s, "newest_version": version},
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
    """Yield the missing members of one group."""
    head = f"group {group.group_id} ({group.num_sealed} of {group.num_needed} members)"
    until = _until(group.deadline_left_s)

    def waits_for(kind: ReasonKind, sample: int, what: str, **facts: Fact) -> Reason:
        known: dict[str, Fact] = {"group": group.group_id, "age_s": group.age_s, "sample": sample}
        return Reason(kind=kind, sentence=f"{head} waits for {what}", facts={**known, **facts})

    for member in group.open_members:
        left_s = member.lease_left_s
        lease = f"lease renewed, {left_s:.0f} s left"
        if left_s <= 0:
            lease = f"lease lapsed {-left_s:.0f} s ago"
        yield waits_for(
            ReasonKind.MEMBER_OPEN if left_s > 0 else ReasonKind.MEMBER_LAPSED,
            member.sample,
            f"sample {member.sample} of generator {member.writer}{_for(group.age_s)}: "
            f"{lease}{until}",
            attempt=member.attempt,
            writer=member.writer,
            lease_left_s=left_s,
        )
    for each in group.awaited:
        yield waits_for(
            ReasonKind.REWARD_AWAITED,
            each.sample,
            f"the reward of sample {each.sample}, which is sealed{_for(each.since_s)}"
            f"{_until(each.deadline_left_s)}",
            attempt=each.attempt,
            since_s=each.since_s,
        )
    for sample in group.not_begun:
        yield waits_for(
            ReasonKind.MEMBER_NOT_BEGUN,
            sample,
            f"sample {sample}{_for(group.age_s)}: no generator has begun it{until}",
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
