"""Why a run waits: typed reasons, from its state at one time. No I/O."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Final

from turnstream.errors import WaitKind, WaitReason
from turnstream.store.run.credits import CreditReason, credit_of
from turnstream.store.waits.pass_rate import recent_groups
from turnstream.store.waits.wait_durations import for_so_long, last_opened, named_ranks, not_asked
from turnstream.store.waits.wait_snapshot import (
    AwaitedReward,
    KeptDeadLetters,
    OpenMember,
    WaitingGroup,
    WaitSnapshot,
)
from turnstream.types import GroupOpened, Purpose

UNSEALED: Final = "left without a seal"
"""The ledger's reason for a trajectory whose block ended without `seal`."""

Fact = str | int | float | None

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
    if snapshot.is_over:
        return [_over(snapshot)]
    is_training = group is None or group.purpose is Purpose.TRAIN
    found = [*_of_services(snapshot), *_of_generators(snapshot)]
    found += _of_bytes(snapshot, 1 if group is None else group.num_samples, is_training)
    if is_training:
        found += [*_of_capacity(snapshot), *_of_pass_rate(snapshot), *_of_shortage(snapshot)]
    for each in snapshot.groups:
        found += _of_group(each, has_failed_only=not snapshot.waits_for_members)
    if snapshot.is_scanned and not found:
        found.append(_nothing_wrong(snapshot))
    if snapshot.dead is not None:
        found.append(_of_dead_letters(snapshot.run, snapshot.dead))
    if snapshot.is_closed:
        found.append(_closed(snapshot))
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


def byte_facts(snapshot: WaitSnapshot) -> dict[str, Fact]:
    """Return the bytes of a run and of its server, for `facts`."""
    return {
        "server_used": snapshot.server_used,
        "server_max": snapshot.server_max,
        "reserved": snapshot.reserved,
        "stored": snapshot.stored,
        "planned": snapshot.planned_bytes,
    }


def _over(snapshot: WaitSnapshot) -> WaitReason:
    return WaitReason(
        WaitKind.RUN_OVER,
        f"run {snapshot.run} is closed and over: all {snapshot.stepped} steps are stepped",
        {"stepped": snapshot.stepped},
    )


def _closed(snapshot: WaitSnapshot) -> WaitReason:
    return WaitReason(
        WaitKind.RUN_CLOSED,
        f"run {snapshot.run} is closed: it takes no new group",
        {"ready": snapshot.num_ready, "open": snapshot.num_waiting},
    )


def _of_dead_letters(run: str, dead: KeptDeadLetters) -> WaitReason:
    return WaitReason(
        WaitKind.DEAD_LETTERS,
        f"dead letters that are kept: {dead.num_trajectories} of trajectories, "
        f"{dead.num_events} of events; the newest is {dead.newest}: {dead.reason}; "
        f"`turnstream dead list {run}` lists them",
        {
            "trajectories": dead.num_trajectories,
            "events": dead.num_events,
            "newest": dead.newest,
            "reason": dead.reason,
        },
    )


def _nothing_wrong(snapshot: WaitSnapshot) -> WaitReason:
    planned, stepped = snapshot.planned, snapshot.stepped
    state = f"step {stepped + 1} is offered"
    if planned <= stepped:
        state = f"the {snapshot.num_ready} groups of step {planned + 1} are about to be planned"
    return WaitReason(
        WaitKind.NOTHING_WRONG,
        f"nothing is wrong: {state}",
        {"planned": planned, "stepped": stepped, "ready": snapshot.num_ready},
    )


def _of_services(snapshot: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield the faults of store, planner and payload, and the trainer's step."""
    planner = snapshot.planner
    if why := snapshot.store_trouble:
        yield WaitReason(
            WaitKind.STORE_REFUSES_WRITES, f"{why}; nothing new is acknowledged", {"reason": why}
        )
    if snapshot.damage is not None and snapshot.stepped < snapshot.damage[0] <= snapshot.planned:
        step, damage = snapshot.damage
        sentence = f"{damage}; {replan_hint(snapshot.run)}"
        yield WaitReason(WaitKind.PAYLOAD_DAMAGED, sentence, {"step": step, "damage": damage})
    if not planner or snapshot.planner_left_s <= 0:
        left_s = snapshot.planner_left_s
        since = f": the lease of {planner} ended {-left_s:.0f} s ago" if planner else ""
        yield WaitReason(
            WaitKind.NO_PLANNER,
            f"no batcher plans the run{since}",
            {"planner": planner, "lease_left_s": left_s},
        )
    for kind, what, trouble in (
        (WaitKind.PLANNING_FAILS, "plan the run", snapshot.planning_trouble),
        (WaitKind.RELEASE_FAILS, "release finished steps", snapshot.release_trouble),
    ):
        if trouble:
            sentence = f"batcher {planner} cannot {what}: {trouble}"
            yield WaitReason(kind, sentence, {"planner": planner, "trouble": trouble})
    # A generator waits for each planned step; a run waits once no other batch can be planned.
    num_ahead = snapshot.config.max_planned_ahead if snapshot.is_scanned else 0
    if snapshot.planned > snapshot.stepped + num_ahead:
        yield _of_trainer(snapshot)


def _of_trainer(snapshot: WaitSnapshot) -> WaitReason:
    """Return which session has the awaited step, and which ranks have not asked for it."""
    step, since_s = snapshot.stepped + 1, snapshot.durations.trainer_s
    trainer = f"trainer session {snapshot.session_epoch} has it"
    if not snapshot.session_epoch:
        trainer = "no trainer session has begun"
    return WaitReason(
        WaitKind.TRAINER_NOT_STEPPED,
        f"step {step} is planned and not stepped; {trainer}{for_so_long(since_s)}"
        f"{not_asked(snapshot.behind)}",
        {
            "awaited": step,
            "planned": snapshot.planned,
            "session_epoch": snapshot.session_epoch,
            "since_s": since_s,
            "behind": named_ranks(snapshot.behind) or None,
        },
    )


def _of_capacity(snapshot: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield a pause, or the lack of capacity by the rule of credits."""
    found = credit_of(
        snapshot.config,
        stepped=snapshot.stepped,
        num_live=snapshot.num_live,
        num_open=snapshot.num_open,
        is_closed=False,
        num_revised=snapshot.num_revised,
        paused=snapshot.paused,
    )
    if found.reason is CreditReason.PAUSED:
        sentence = f"{found.sentence}; no group starts, no batch is planned"
        yield WaitReason(WaitKind.RUN_PAUSED, sentence, {"reason": snapshot.paused})
    elif found.reason is not None and not snapshot.is_closed:
        since_s = snapshot.durations.opened_s
        facts: dict[str, Fact] = {"open": snapshot.num_open, "max_open_groups": found.most}
        if found.reason is CreditReason.STALENESS:
            facts = {"live": snapshot.num_live, "most": found.most, "stepped": snapshot.stepped}
        sentence = found.sentence + last_opened(since_s)
        yield WaitReason(WaitKind.OUT_OF_CAPACITY, sentence, {**facts, "since_s": since_s})


def _of_bytes(snapshot: WaitSnapshot, num_samples: int, is_training: bool) -> Iterator[WaitReason]:
    """Yield the lack of bytes for a group, by the rule of open_group.lua."""
    bytes_ = snapshot.bytes_for(num_samples)
    is_urgent = snapshot.is_starved and is_training
    facts = {
        **byte_facts(snapshot),
        "held": bytes_.held,
        "needed": bytes_.needed,
        "max_bytes": bytes_.max_bytes,
    }
    if snapshot.is_closed and not bytes_.refuses_writes:
        return
    if why := bytes_.why_full(is_urgent=is_urgent):
        yield WaitReason(WaitKind.STORE_FULL, why, facts)
        return
    if why := bytes_.why_group_waits(is_urgent=is_urgent):
        yield WaitReason(WaitKind.OUT_OF_BYTES, why, facts)
    if 0 < bytes_.max_bytes < bytes_.planned:
        unseen = f": {snapshot.unseen_by}" if snapshot.unseen_by else ""
        num_steps = snapshot.planned - snapshot.released
        sentence = (
            f"max_bytes={bytes_.max_bytes:,} is less than the {num_steps} retained steps take, "
            f"{bytes_.planned:,}: the run continues above it, step by step. "
            "Raise it; a step is released when it is committed and no longer retained, is archived "
            f"if the run asks for that, and was seen by every observer{unseen}"
        )
        yield WaitReason(WaitKind.BUDGET_TOO_SMALL, sentence, facts)


def _of_generators(snapshot: WaitSnapshot) -> Iterator[WaitReason]:
    for each in snapshot.lapsed_writers:
        yield WaitReason(
            WaitKind.GENERATOR_GONE,
            f"generator {each.writer} is gone: all {each.num_open} trajectories that it holds "
            f"have lapsed, the last {each.silent_s:.0f} s ago",
            {"writer": each.writer, "open": each.num_open, "silent_s": each.silent_s},
        )


def _of_pass_rate(snapshot: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield that most of the groups that were decided lately were dropped."""
    recent = recent_groups(snapshot)
    if why := recent.why_low(least=snapshot.config.batch_groups):
        ended = ", ".join(f"{number} x {end}" for end, number in snapshot.untrained)
        shown = f"; trajectories that ended untrained, of the whole run: {ended}" if ended else ""
        facts = {
            "dropped": recent.num_dropped,
            "decided": recent.num_decided,
            "since_step": recent.since_step,
            **dict(snapshot.untrained),
        }
        yield WaitReason(WaitKind.PASS_RATE_LOW, why + shown, facts)


def _of_shortage(snapshot: WaitSnapshot) -> Iterator[WaitReason]:
    """Yield the missing groups of the next step and their causes, if the trainer waits for them."""
    if not snapshot.is_starved:
        return
    step, needed = snapshot.stepped + 1, snapshot.config.batch_groups
    since_s, opened_s = snapshot.durations.step_s, snapshot.durations.opened_s
    waits = for_so_long(since_s, verb=" waits")
    has = f"step {step}{waits}: {snapshot.num_ready} of {needed} groups ready"
    facts: dict[str, Fact] = {"step": step, "ready": snapshot.num_ready, "needed": needed}
    facts["since_s"] = since_s
    if snapshot.num_waiting:
        facts["open"] = snapshot.num_waiting
        sentence = f"{has}, {snapshot.num_waiting} open"
        yield WaitReason(WaitKind.TOO_FEW_READY, sentence, facts)
    else:
        facts |= {"opened_s": opened_s, "newest_version": snapshot.newest_version}
        sentence = f"{has}, and no generator has a group open{last_opened(opened_s)}; "
        sentence += newest_policy(snapshot.newest_version)
        yield WaitReason(WaitKind.OUT_OF_DATA, sentence, facts)
    added, filtered = snapshot.prompts_added, snapshot.prompts_filtered
    is_exhausted = added > 0 and not (snapshot.prompts_left or snapshot.prompts_given)
    if is_exhausted and not snapshot.is_closed:
        yield WaitReason(
            WaitKind.PROMPTS_EXHAUSTED,
            f"all {added} prompts of the run are done, {filtered} of them filtered: add others, "
            "or close the run",
            {"prompts": added, "filtered": filtered},
        )
    for key, granted_s in snapshot.refills:
        yield WaitReason(
            WaitKind.REFILL_OPEN,
            f"attempt {key.attempt} of sample {key.sample} of group {key.group_id} was granted "
            f"{granted_s:.0f} s ago, and no generator takes it",
            {
                "group": key.group_id,
                "sample": key.sample,
                "attempt": key.attempt,
                "since_s": granted_s,
            },
        )
    if number := snapshot.num_unsealed:
        yield WaitReason(
            WaitKind.MEMBER_UNSEALED,
            f"{number} trajectories were left without a seal and are not trained: the "
            "generator has to call seal(reward=...) before the block of a trajectory ends",
            {"trajectories": number},
        )


def _of_group(group: WaitingGroup, *, has_failed_only: bool) -> Iterator[WaitReason]:
    """Yield the missing members of one group, or only those whose lease has lapsed."""
    head = f"group {group.group_id}"
    if group.num_needed is not None:
        head += f" ({group.num_sealed} of {group.num_needed} members)"
    for member in group.open_members:
        if member.lease_left_s <= 0 or not has_failed_only:
            yield _of_member(group, head, member)
    if has_failed_only:
        return
    for each in group.awaited:
        yield _of_reward(group, head, each)
    for sample in group.not_begun:
        yield WaitReason(
            WaitKind.MEMBER_NOT_BEGUN,
            f"{head} waits for sample {sample}{for_so_long(group.age_s)}: no generator has begun "
            f"it{_until(group.deadline_left_s)}",
            {"group": group.group_id, "age_s": group.age_s, "sample": sample},
        )


def _of_member(group: WaitingGroup, head: str, member: OpenMember) -> WaitReason:
    key, left_s = member.key, member.lease_left_s
    lease = f"lease renewed, {left_s:.0f} s left"
    if left_s <= 0:
        lease = f"lease lapsed {-left_s:.0f} s ago"
    return WaitReason(
        WaitKind.MEMBER_OPEN if left_s > 0 else WaitKind.MEMBER_LAPSED,
        f"{head} waits for sample {key.sample} of generator {member.writer}"
        f"{for_so_long(group.age_s)}: {lease}{_until(group.deadline_left_s)}",
        {
            "group": key.group_id,
            "age_s": group.age_s,
            "sample": key.sample,
            "attempt": key.attempt,
            "writer": member.writer,
            "lease_left_s": left_s,
            "deadline_left_s": group.deadline_left_s,
        },
    )


def _of_reward(group: WaitingGroup, head: str, each: AwaitedReward) -> WaitReason:
    return WaitReason(
        WaitKind.REWARD_AWAITED,
        f"{head} waits for the reward of sample {each.key.sample}, which is sealed"
        f"{for_so_long(each.since_s)}{_until(each.deadline_left_s)}",
        {
            "group": group.group_id,
            "age_s": group.age_s,
            "sample": each.key.sample,
            "attempt": each.key.attempt,
            "since_s": each.since_s,
        },
    )


def _until(seconds: float | None) -> str:
    """Return when a deadline comes.

    >>> _until(4.2), _until(-3), _until(None)
    ('; its deadline is in 4 s', '; its deadline was 3 s ago', '')
    """
    if seconds is None:
        return ""
    when = f"is in {seconds:.0f} s" if seconds > 0 else f"was {-seconds:.0f} s ago"
    return f"; its deadline {when}"
