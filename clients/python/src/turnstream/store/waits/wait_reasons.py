"""Why a run waits: typed reasons with their sentences, from its state at one time. No I/O.

docs/waits.md has an example of each sentence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from turnstream.errors import WaitKind, WaitReason
from turnstream.store.client.fullness import Bytes
from turnstream.store.run.credits import CreditReason, credit_of
from turnstream.store.waits.wait_snapshot import MemberState, WaitingMember, WaitSnapshot
from turnstream.types import GroupOpened, Purpose
from turnstream.types.names import few_of

Fact = str | int | float | None

UNSEALED: Final = "left without a seal"
"""The ledger's reason for a trajectory whose block ended without `seal`."""

LOW_PASS_RATE: Final = 0.5
"""Share of the decided groups below which most sampling is wasted."""

_OPTIONAL: Final = re.compile(r"\[([^\]]*?\{(\w+)[^\]]*)\]")

_GROUP: Final = "group {group}[ ({sealed} of {needed} members)] waits for "
_OF_MEMBERS: Final = {
    MemberState.LAPSED: (
        f"{_GROUP}sample {{sample}} of generator {{writer}}[ for {{since_s:.0f}} s]: lease lapsed "
        "{lapsed_s:.0f} s ago"
    ),
    MemberState.UNREWARDED: (
        f"{_GROUP}the reward of sample {{sample}}, which is sealed[ for {{since_s:.0f}} s]"
    ),
    MemberState.GRANTED: (
        "attempt {attempt} of sample {sample} of group {group} was granted {since_s:.0f} s ago, "
        "and no generator takes it"
    ),
    MemberState.NOT_STARTED: (
        f"{_GROUP}sample {{sample}}[ for {{since_s:.0f}} s]: no generator has started it"
    ),
    MemberState.OPEN: (
        f"{_GROUP}sample {{sample}} of generator {{writer}}[ for {{since_s:.0f}} s]: lease "
        "renewed, {lease_left_s:.0f} s left"
    ),
}
"""The sentences of samples, the most important first."""


def wait_reason(kind: WaitKind, text: str, facts: Mapping[str, Fact], **words: Fact) -> WaitReason:
    """Return a reason. A part of `text` in brackets is left out if its first value is unknown.

    >>> wait_reason(WaitKind.NO_SIGNAL, "{of}[ since {step}]", {"step": None}, of="2 of 3").sentence
    '2 of 3'

    Args:
        kind: kind of the reason.
        text: the sentence, with names of values in braces.
        facts: values for programs; at most eight, see records/statuses.py.
        words: the other values of the sentence.
    """
    values = {**facts, **words}

    def known(part: re.Match[str]) -> str:
        return "" if values[part[2]] in (None, "") else part[1]

    return WaitReason(kind, _OPTIONAL.sub(known, text).format_map(values), facts)


def reasons(seen: WaitSnapshot | None, *, group: GroupOpened | None = None) -> list[WaitReason]:
    """Return why a run waits, the most important reason first.

    A snapshot with a scanned ledger has at least one reason. Normal states, such as an open member,
    are reasons only while somebody waits for them.

    Args:
        seen: state of the run; None if the store could not return it.
        group: the group that waits for admission; None stands for one of a single sample.
    """
    if seen is None:
        return []
    if seen.has_ended:
        text = "run {run} is closed and finished: all {stepped} steps are stepped"
        return [wait_reason(WaitKind.RUN_CLOSED, text, {"stepped": seen.stepped}, run=seen.run)]
    found = [*_obstacles(seen, group)]
    if seen.is_scanned and not found:
        found.append(_nothing_wrong(seen))
    return [*found, *_notes(seen)]


def _obstacles(seen: WaitSnapshot, group: GroupOpened | None) -> Iterator[WaitReason]:
    """Yield the reasons by importance."""
    is_training = group is None or group.purpose is Purpose.TRAIN
    of_bytes = [*_of_bytes(seen, 1 if group is None else group.num_samples, is_training)]
    of_capacity = _of_capacity(seen) if is_training else None
    yield from (each for each in of_bytes if each.kind is WaitKind.STORE_FULL)
    if seen.store_trouble:
        text = "{reason}; nothing new is acknowledged"
        yield wait_reason(WaitKind.STORE_AWAY, text, {"reason": seen.store_trouble})
    if of_capacity is not None and of_capacity.kind is WaitKind.RUN_PAUSED:
        yield of_capacity
    yield from _of_batcher(seen)
    # A generator waits for each planned step; a run waits once no other batch can be planned.
    if seen.planned > seen.stepped + (seen.config.max_planned_ahead if seen.is_scanned else 0):
        yield _of_trainer(seen)
    if is_training and seen.is_starved:
        yield from _of_shortage(seen)
    yield from _of_generators(seen)
    if is_training:
        yield from _of_signal(seen)
    if seen.waits_for_members:
        yield from _of_members(each for each in seen.members if not each.has_lapsed)
    if of_capacity is not None and of_capacity.kind is WaitKind.OUT_OF_CAPACITY:
        yield of_capacity
    if seen.release_trouble:
        facts: dict[str, Fact] = {"planner": seen.planner, "trouble": seen.release_trouble}
        text = "batcher {planner} cannot release finished steps: {trouble}"
        yield wait_reason(WaitKind.RELEASE_FAILS, text, facts)
    yield from (each for each in of_bytes if each.kind is WaitKind.OUT_OF_BYTES)


def _notes(seen: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield facts that accompany the reasons: dead letters, observers, and a closed run."""
    if (dead := seen.dead) is not None:
        text = (
            "dead letters that are kept: {trajectories} of trajectories, {events} of events; the "
            "newest is {newest}: {reason}; `turnstream dead list {run}` lists them"
        )
        yield wait_reason(WaitKind.PAYLOAD_DAMAGED, text, dead._asdict(), run=seen.run)
    if seen.unseen_by:
        text = (
            "no step after step {released} is deleted: observer {observers}; "
            "`turnstream run remove-observer {run} NAME` removes one"
        )
        facts: dict[str, Fact] = {"observers": seen.unseen_by, "released": seen.released}
        yield wait_reason(WaitKind.RELEASE_FAILS, text, facts, run=seen.run)
    if seen.is_closed:
        facts = {"ready": seen.num_ready, "open": seen.num_waiting}
        text = "run {run} is closed: it takes no new group"
        yield wait_reason(WaitKind.RUN_CLOSED, text, facts, run=seen.run)


def _nothing_wrong(seen: WaitSnapshot) -> WaitReason:
    text = "nothing is wrong: step {next} is offered"
    if seen.planned <= seen.stepped:
        text = "nothing is wrong: the {ready} groups of step {next} are about to be planned"
    facts = {"planned": seen.planned, "stepped": seen.stepped, "ready": seen.num_ready}
    return wait_reason(WaitKind.NOTHING_WRONG, text, facts, next=seen.stepped + 1)


def _of_batcher(seen: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield damaged payload, a missing planner, and one that cannot plan."""
    if seen.damage is not None and seen.stepped < seen.damage[0] <= seen.planned:
        facts: dict[str, Fact] = {"step": seen.damage[0], "damage": seen.damage[1]}
        hint = replan_hint(seen.run)
        yield wait_reason(WaitKind.PAYLOAD_DAMAGED, "{damage}; {hint}", facts, hint=hint)
    left_s = seen.planner_left_s
    if not seen.planner or left_s <= 0:
        text = "no batcher plans the run[: the lease of {planner} ended {ended_s:.0f} s ago]"
        facts = {"planner": seen.planner, "lease_left_s": left_s}
        yield wait_reason(WaitKind.BATCHER_AWAY, text, facts, ended_s=-left_s)
    if seen.planning_trouble:
        facts = {"planner": seen.planner, "trouble": seen.planning_trouble}
        text = "batcher {planner} cannot plan the run: {trouble}"
        yield wait_reason(WaitKind.PLANNING_FAILS, text, facts)


def _of_trainer(seen: WaitSnapshot) -> WaitReason:
    """Return which session has the awaited step, and which ranks have not asked for it."""
    trainer = "no trainer session has begun"
    if seen.session_epoch:
        trainer = "trainer session {session_epoch} has it"
    text = (
        f"step {{awaited}} is planned and not stepped; {trainer}[ for {{since_s:.0f}} s]"
        "[; dp_rank {behind} did not ask for it]"
    )
    facts: dict[str, Fact] = {
        "awaited": seen.stepped + 1,
        "planned": seen.planned,
        "session_epoch": seen.session_epoch,
        "since_s": seen.durations.trainer_s,
        "behind": few_of(seen.behind) or None,
    }
    return wait_reason(WaitKind.TRAINER_NOT_STEPPED, text, facts)


def _of_capacity(seen: WaitSnapshot) -> WaitReason | None:
    """Return a pause, or the lack of capacity by the rule of credits."""
    found = credit_of(
        seen.config,
        stepped=seen.stepped,
        announced=seen.announced,
        num_live=seen.num_live,
        num_open=seen.num_open,
        is_closed=False,
        num_revised=seen.planned_groups - seen.planned * seen.config.batch_groups,
        paused=seen.paused,
    )
    if found.reason is CreditReason.PAUSED:
        text = "{why}; no group starts, no batch is planned"
        return wait_reason(WaitKind.RUN_PAUSED, text, {"reason": seen.paused}, why=found.sentence)
    if found.reason is None or seen.is_closed:
        return None
    text = "{why}[; the last was opened {since_s:.0f} s ago]"
    facts: dict[str, Fact] = {"live": seen.num_live, "most": found.most, "stepped": seen.stepped}
    if found.reason is CreditReason.OPEN_GROUPS:
        facts = {"open": seen.num_open, "max_open_groups": seen.config.max_open_groups}
    elif found.reason is CreditReason.ANNOUNCEMENT:
        text = "{why}[ for {stepped_s:.0f} s]"
        facts |= {"announced": seen.announced, "stepped_s": seen.durations.step_s}
    facts["since_s"] = seen.durations.opened_s
    return wait_reason(WaitKind.OUT_OF_CAPACITY, text, facts, why=found.sentence)


def _of_bytes(seen: WaitSnapshot, num_samples: int, is_training: bool) -> Iterator[WaitReason]:
    """Yield the lack of bytes for a group, by the rule of group_admission.lua."""
    budget = seen.budget.of_group(num_samples)
    if seen.is_closed and not budget.why_refused:
        return
    facts = byte_facts(budget)
    facts |= {"held": budget.held, "needed": budget.needed, "max_bytes": budget.max_bytes}
    shortage = budget.shortage(is_urgent=seen.is_starved and is_training)
    if shortage is not None:
        kind = WaitKind.STORE_FULL if shortage.is_full else WaitKind.OUT_OF_BYTES
        yield wait_reason(kind, "{why}", facts, why=shortage.why)
        if shortage.is_full:
            return
    if 0 < budget.max_bytes < budget.planned:
        text = (
            "max_bytes={max_bytes:,} is less than the {steps} retained steps take, {planned:,}: "
            "the run continues above it, step by step. Raise it; a step is released when it is "
            "committed and no longer retained, is archived if the run asks for that, and was seen "
            "by every observer[: {unseen_by}]"
        )
        words = {"steps": seen.planned - seen.released, "unseen_by": seen.unseen_by}
        yield wait_reason(WaitKind.OUT_OF_BYTES, text, facts, **words)


def _of_shortage(seen: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield the missing groups of the next step, for which the trainer waits."""
    prompts, newest = seen.prompts, seen.newest_version
    if prompts.is_exhausted and not seen.is_closed:
        text = (
            "all {prompts} prompts of the run are done, {filtered} of them filtered: add others, "
            "or close the run"
        )
        facts: dict[str, Fact] = {"prompts": prompts.num_added, "filtered": prompts.num_filtered}
        yield wait_reason(WaitKind.TOO_FEW_READY, text, facts)
    text = "step {step}[ waits for {since_s:.0f} s]: {ready} of {needed} groups ready, "
    facts = {
        "step": seen.stepped + 1,
        "ready": seen.num_ready,
        "needed": seen.config.batch_groups,
        "open": seen.num_waiting,
        "since_s": seen.durations.step_s,
    }
    if seen.num_waiting:
        yield wait_reason(WaitKind.TOO_FEW_READY, text + "{open} open", facts)
        return
    text += (
        "and no generator has a group open[; the last was opened {opened_s:.0f} s ago]; {policy}"
    )
    facts |= {"opened_s": seen.durations.opened_s, "newest_version": newest}
    yield wait_reason(WaitKind.TOO_FEW_READY, text, facts, policy=newest_policy(newest))


def _of_generators(seen: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield the generators that are gone, and the samples whose lease has lapsed."""
    text = (
        "generator {writer} is gone: all {open} trajectories that it writes have lapsed, the last "
        "{silent_s:.0f} s ago"
    )
    for each in seen.lapsed_writers:
        facts = {"writer": each.writer, "open": each.num_open, "silent_s": each.silent_s}
        yield wait_reason(WaitKind.GENERATOR_GONE, text, facts)
    yield from _of_members(each for each in seen.members if each.has_lapsed)


def _of_members(members: Iterable[WaitingMember]) -> Iterator[WaitReason]:
    """Yield the samples that groups wait for."""
    importance = list(_OF_MEMBERS)
    for each in sorted(members, key=lambda each: importance.index(each.state)):
        kind = WaitKind.GENERATOR_GONE if each.has_lapsed else WaitKind.MEMBER_OPEN
        text = f"{_OF_MEMBERS[each.state]}[; its deadline {{deadline}}]"
        facts: dict[str, Fact] = {
            "group": each.key.group_id,
            "sample": each.key.sample,
            "attempt": each.key.attempt,
            "state": each.state.value,
            "writer": each.writer,
            "since_s": each.since_s,
            "lease_left_s": each.lease_left_s,
            "deadline_left_s": each.deadline_left_s,
        }
        words: dict[str, Fact] = {"sealed": each.num_sealed, "needed": each.num_needed}
        words |= {"lapsed_s": -(each.lease_left_s or 0), "deadline": _in_words(each)}
        yield wait_reason(kind, text, facts, **words)


def _in_words(member: WaitingMember) -> str:
    """Return when the deadline of a sample comes; empty without one."""
    if (left_s := member.deadline_left_s) is None:
        return ""
    return f"is in {left_s:.0f} s" if left_s > 0 else f"was {-left_s:.0f} s ago"


def _of_signal(seen: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield samples that train nothing: dropped groups, advantages of 0, missing seals."""
    step, dropped, decided = recent_groups(seen)
    if decided - dropped < LOW_PASS_RATE * decided and decided >= seen.config.batch_groups:
        text = (
            "{dropped} of the {decided} groups that were decided[ since step {since} was planned] "
            "were dropped[; trajectories that ended untrained, of the whole run: {ended}]"
        )
        facts: dict[str, Fact] = {"dropped": dropped, "decided": decided, "since_step": step}
        facts |= dict(seen.untrained)
        ended = ", ".join(f"{number} x {end}" for end, number in seen.untrained)
        yield wait_reason(WaitKind.NO_SIGNAL, text, facts, since=step or None, ended=ended)
    if seen.num_flat_groups:
        text = (
            "all advantages of step {step}, the newest batch, are 0: the rewards in each of its "
            "{groups} groups are equal, so its policy loss trains nothing"
        )
        facts = {"step": seen.planned, "groups": seen.num_flat_groups}
        yield wait_reason(WaitKind.NO_SIGNAL, text, facts)
    if seen.num_unsealed and seen.is_starved:
        text = (
            "{trajectories} trajectories were left without a seal and are not trained: the "
            "generator has to call seal(reward=...) before the block of a trajectory ends"
        )
        yield wait_reason(WaitKind.NO_SIGNAL, text, {"trajectories": seen.num_unsealed})


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


def recent_groups(seen: WaitSnapshot) -> RecentGroups:
    """Return the groups that were decided since the batch before the newest was planned.

    Two batches, so that there are enough groups right after a plan. `at_plans` is empty before
    the first plan.
    """
    at_plans = seen.at_plans or "0:0:0"
    step, dropped, in_batches = map(int, at_plans.partition(",")[0].split(":"))
    num_dropped = max(0, seen.num_opened - seen.num_live - dropped)
    num_passed = max(0, seen.planned_groups - in_batches) + seen.num_ready
    return RecentGroups(step, num_dropped, num_decided=num_dropped + num_passed)
