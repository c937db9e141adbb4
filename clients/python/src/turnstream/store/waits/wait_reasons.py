"""Why a run waits: typed reasons, from its state at one time. No I/O."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Final, NamedTuple

from turnstream.errors import WaitKind, WaitReason
from turnstream.store.client.fullness import Bytes
from turnstream.store.run.credits import CreditReason, credit_of
from turnstream.store.waits.sentences import Fact, wait_reason
from turnstream.store.waits.wait_snapshot import WaitingGroup, WaitSnapshot
from turnstream.types import GroupOpened, Purpose
from turnstream.types.names import few_of

UNSEALED: Final = "left without a seal"
"""The ledger's reason for a trajectory whose block ended without `seal`."""

LOW_PASS_RATE: Final = 0.5
"""Share of the decided groups below which most sampling is wasted."""

_ORDER: Final = list(WaitKind)


def reasons(snapshot: WaitSnapshot | None, *, group: GroupOpened | None = None) -> list[WaitReason]:
    """Return why a run waits, the most important reason first.

    A snapshot with a scanned ledger has at least one reason. Normal states, such as an open member,
    are reasons only while somebody waits for them.

    Args:
        snapshot: state of the run; None if the store could not return it.
        group: the group that waits for admission; None stands for one of a single sample.
    """
    if snapshot is None:
        return []
    if snapshot.has_ended:
        facts: dict[str, Fact] = {"stepped": snapshot.stepped}
        return [wait_reason(WaitKind.RUN_FINISHED, facts, run=snapshot.run)]
    is_training = group is None or group.purpose is Purpose.TRAIN
    found = [*_of_services(snapshot), *_of_generators(snapshot)]
    found += _of_bytes(snapshot, 1 if group is None else group.num_samples, is_training)
    if is_training:
        found += [*_of_capacity(snapshot), *_of_pass_rate(snapshot), *_of_shortage(snapshot)]
        found += _of_newest_batch(snapshot)
    for each in snapshot.groups:
        found += _of_group(each, has_failed_only=not snapshot.waits_for_members)
    if snapshot.is_scanned and not found:
        found.append(_nothing_wrong(snapshot))
    found += _of_control(snapshot)
    return sorted(found, key=lambda reason: _ORDER.index(WaitKind(reason.kind)))


def replan_hint(run: str) -> str:
    """Return the command that repairs damaged payload.

    >>> replan_hint("maze")
    '`turnstream run replan maze` sets it aside, and plans again without it'
    """
    return f"`turnstream run replan {shlex.quote(run)}` sets it aside, and plans again without it"


def newest_policy(version: int | None) -> str:
    """Return the newest policy version in words.

    >>> newest_policy(4), newest_policy(None)
    ('the newest policy version is 4', 'no policy version was announced')
    """
    if version is None:
        return "no policy version was announced"
    return f"the newest policy version is {version}"


def byte_facts(budget: Bytes) -> dict[str, Fact]:
    """Return the bytes of a run and of its server, for `facts`."""
    of_run = {"reserved": budget.reserved, "stored": budget.stored, "planned": budget.planned}
    return {"server_used": budget.used, "server_max": budget.allowed, **of_run}


class RecentGroups(NamedTuple):
    """The groups that were decided since a step was planned; since the start of the run for 0."""

    since_step: int
    num_dropped: int
    num_decided: int


def recent_groups(snapshot: WaitSnapshot) -> RecentGroups:
    """Return the groups that were decided since the batch before the newest was planned.

    Two batches, so that there are enough groups right after a plan. `at_plans` is empty before
    the first plan.
    """
    at_plans = snapshot.at_plans or "0:0:0"
    step, dropped, in_batches = map(int, at_plans.partition(",")[0].split(":"))
    num_dropped = max(0, snapshot.num_opened - snapshot.num_live - dropped)
    num_passed = max(0, snapshot.planned_groups - in_batches) + snapshot.num_ready
    return RecentGroups(step, num_dropped, num_decided=num_dropped + num_passed)


def _of_control(snapshot: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield facts that accompany the reasons: dead letters, observers, and a closed run."""
    if (dead := snapshot.dead) is not None:
        facts: dict[str, Fact] = {
            "trajectories": dead.num_trajectories,
            "events": dead.num_events,
            "newest": dead.newest,
            "reason": dead.reason,
        }
        yield wait_reason(WaitKind.DEAD_LETTERS, facts, run=snapshot.run)
    if snapshot.unseen_by:
        facts = {"observers": snapshot.unseen_by, "released": snapshot.released}
        yield wait_reason(WaitKind.OBSERVER_BEHIND, facts, run=snapshot.run)
    if snapshot.is_closed:
        facts = {"ready": snapshot.num_ready, "open": snapshot.num_waiting}
        yield wait_reason(WaitKind.RUN_CLOSED, facts, run=snapshot.run)


def _nothing_wrong(snapshot: WaitSnapshot) -> WaitReason:
    planned, stepped, ready = snapshot.planned, snapshot.stepped, snapshot.num_ready
    state = f"step {stepped + 1} is offered"
    if planned <= stepped:
        state = f"the {ready} groups of step {planned + 1} are about to be planned"
    facts: dict[str, Fact] = {"planned": planned, "stepped": stepped, "ready": ready}
    return wait_reason(WaitKind.NOTHING_WRONG, facts, state=state)


def _of_services(snapshot: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield the faults of store, planner and payload, and the trainer's step."""
    planner, left_s = snapshot.planner, snapshot.planner_left_s
    if snapshot.store_trouble:
        yield wait_reason(WaitKind.STORE_REFUSES_WRITES, {"reason": snapshot.store_trouble})
    if snapshot.damage is not None and snapshot.stepped < snapshot.damage[0] <= snapshot.planned:
        facts: dict[str, Fact] = {"step": snapshot.damage[0], "damage": snapshot.damage[1]}
        yield wait_reason(WaitKind.PAYLOAD_DAMAGED, facts, hint=replan_hint(snapshot.run))
    if not planner or left_s <= 0:
        facts = {"planner": planner, "lease_left_s": left_s}
        yield wait_reason(WaitKind.NO_PLANNER, facts, ended_s=-left_s)
    for kind, trouble in (
        (WaitKind.PLANNING_FAILS, snapshot.planning_trouble),
        (WaitKind.RELEASE_FAILS, snapshot.release_trouble),
    ):
        if trouble:
            yield wait_reason(kind, {"planner": planner, "trouble": trouble})
    # A generator waits for each planned step; a run waits once no other batch can be planned.
    num_ahead = snapshot.config.max_planned_ahead if snapshot.is_scanned else 0
    if snapshot.planned > snapshot.stepped + num_ahead:
        yield _of_trainer(snapshot)


def _of_trainer(snapshot: WaitSnapshot) -> WaitReason:
    """Return which session has the awaited step, and which ranks have not asked for it."""
    trainer = f"trainer session {snapshot.session_epoch} has it"
    facts: dict[str, Fact] = {
        "awaited": snapshot.stepped + 1,
        "planned": snapshot.planned,
        "session_epoch": snapshot.session_epoch,
        "since_s": snapshot.durations.trainer_s,
        "behind": few_of(snapshot.behind) or None,
    }
    if not snapshot.session_epoch:
        trainer = "no trainer session has begun"
    return wait_reason(WaitKind.TRAINER_NOT_STEPPED, facts, trainer=trainer)


def _of_capacity(snapshot: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield a pause, or the lack of capacity by the rule of credits."""
    found = credit_of(
        snapshot.config,
        stepped=snapshot.stepped,
        announced=snapshot.announced,
        num_live=snapshot.num_live,
        num_open=snapshot.num_open,
        is_closed=False,
        num_revised=snapshot.planned_groups - snapshot.planned * snapshot.config.batch_groups,
        paused=snapshot.paused,
    )
    if found.reason is CreditReason.PAUSED:
        yield wait_reason(WaitKind.RUN_PAUSED, {"reason": snapshot.paused}, why=found.sentence)
    elif found.reason is not None and not snapshot.is_closed:
        max_open_groups = snapshot.config.max_open_groups
        facts: dict[str, Fact] = {"open": snapshot.num_open, "max_open_groups": max_open_groups}
        kind = WaitKind.OUT_OF_CAPACITY
        if found.reason is not CreditReason.OPEN_GROUPS:
            facts = {"live": snapshot.num_live, "most": found.most, "stepped": snapshot.stepped}
        if found.reason is CreditReason.ANNOUNCEMENT:
            kind = WaitKind.WEIGHTS_NOT_ANNOUNCED
            facts |= {"announced": snapshot.announced, "stepped_s": snapshot.durations.step_s}
        facts["since_s"] = snapshot.durations.opened_s
        yield wait_reason(kind, facts, why=found.sentence)


def _of_bytes(snapshot: WaitSnapshot, num_samples: int, is_training: bool) -> Iterator[WaitReason]:
    """Yield the lack of bytes for a group, by the rule of open_group.lua."""
    budget = snapshot.budget.of_group(num_samples)
    if snapshot.is_closed and not budget.why_refused:
        return
    facts = byte_facts(budget)
    facts |= {"held": budget.held, "needed": budget.needed, "max_bytes": budget.max_bytes}
    shortage = budget.shortage(is_urgent=snapshot.is_starved and is_training)
    if shortage is not None:
        kind = WaitKind.STORE_FULL if shortage.is_full else WaitKind.OUT_OF_BYTES
        yield wait_reason(kind, facts, why=shortage.why)
        if shortage.is_full:
            return
    if 0 < budget.max_bytes < budget.planned:
        steps = snapshot.planned - snapshot.released
        unseen_by = snapshot.unseen_by
        yield wait_reason(WaitKind.BUDGET_TOO_SMALL, facts, steps=steps, unseen_by=unseen_by)


def _of_generators(snapshot: WaitSnapshot) -> Iterator[WaitReason]:
    for each in snapshot.lapsed_writers:
        facts: dict[str, Fact] = {"writer": each.writer, "open": each.num_open}
        yield wait_reason(WaitKind.GENERATOR_GONE, {**facts, "silent_s": each.silent_s})


def _of_pass_rate(snapshot: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield that most of the groups that were decided lately were dropped."""
    step, dropped, decided = recent_groups(snapshot)
    is_low = decided - dropped < LOW_PASS_RATE * decided
    if is_low and decided >= snapshot.config.batch_groups:
        facts: dict[str, Fact] = {"dropped": dropped, "decided": decided, "since_step": step}
        ended = ", ".join(f"{number} x {end}" for end, number in snapshot.untrained)
        facts |= dict(snapshot.untrained)
        yield wait_reason(WaitKind.PASS_RATE_LOW, facts, since=step or None, ended=ended)


def _of_newest_batch(snapshot: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield that the newest batch has no advantage other than 0."""
    if snapshot.num_flat_groups:
        facts: dict[str, Fact] = {"step": snapshot.planned, "groups": snapshot.num_flat_groups}
        yield wait_reason(WaitKind.NO_SIGNAL, facts)


def _of_shortage(snapshot: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield the missing groups of the next step and their causes, if the trainer waits for them."""
    if not snapshot.is_starved:
        return
    facts: dict[str, Fact] = {
        "step": snapshot.stepped + 1,
        "ready": snapshot.num_ready,
        "needed": snapshot.config.batch_groups,
        "since_s": snapshot.durations.step_s,
    }
    if snapshot.num_waiting:
        yield wait_reason(WaitKind.TOO_FEW_READY, {**facts, "open": snapshot.num_waiting})
    else:
        newest = snapshot.newest_version
        facts |= {"opened_s": snapshot.durations.opened_s, "newest_version": newest}
        yield wait_reason(WaitKind.OUT_OF_DATA, facts, newest=newest_policy(newest))
    prompts = snapshot.prompts
    if prompts.is_exhausted and not snapshot.is_closed:
        facts = {"prompts": prompts.num_added, "filtered": prompts.num_filtered}
        yield wait_reason(WaitKind.PROMPTS_EXHAUSTED, facts)
    for (group_id, sample, attempt), since_s in snapshot.refills:
        facts = {"group": group_id, "sample": sample, "attempt": attempt, "since_s": since_s}
        yield wait_reason(WaitKind.REFILL_OPEN, facts)
    if snapshot.num_unsealed:
        yield wait_reason(WaitKind.MEMBER_UNSEALED, {"trajectories": snapshot.num_unsealed})


def _of_group(group: WaitingGroup, *, has_failed_only: bool) -> Iterator[WaitReason]:
    """Yield the missing members of one group, or only those whose lease has lapsed."""
    shared: dict[str, Fact] = {"group": group.group_id, "age_s": group.age_s}
    words: dict[str, Fact] = {"sealed": group.num_sealed, "needed": group.num_needed}
    words["deadline"] = _in_words(group.deadline_left_s)
    for each in group.open_members:
        left_s = each.lease_left_s
        if left_s > 0 and has_failed_only:
            continue
        facts = {**shared, "sample": each.key.sample, "attempt": each.key.attempt}
        facts |= {"writer": each.writer, "lease_left_s": left_s}
        facts["deadline_left_s"] = group.deadline_left_s
        kind = WaitKind.MEMBER_OPEN if left_s > 0 else WaitKind.MEMBER_LAPSED
        yield wait_reason(kind, facts, **words, lapsed_s=-left_s)
    if has_failed_only:
        return
    for each in group.awaited:
        facts = {**shared, "sample": each.key.sample, "attempt": each.key.attempt}
        facts["since_s"] = each.since_s
        words["deadline"] = _in_words(each.deadline_left_s)
        yield wait_reason(WaitKind.REWARD_AWAITED, facts, **words)
    words["deadline"] = _in_words(group.deadline_left_s)
    for sample in group.not_started:
        yield wait_reason(WaitKind.MEMBER_NOT_STARTED, {**shared, "sample": sample}, **words)


def _in_words(left_s: float | None) -> str:
    """Return when a deadline comes.

    >>> _in_words(4.2), _in_words(-3), _in_words(None)
    ('is in 4 s', 'was 3 s ago', '')
    """
    if left_s is None:
        return ""
    return f"is in {left_s:.0f} s" if left_s > 0 else f"was {-left_s:.0f} s ago"
