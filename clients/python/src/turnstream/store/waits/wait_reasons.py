"""Why a generator's wait brought nothing: typed reasons, from what was read of its run. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from turnstream.errors import WaitKind, WaitReason
from turnstream.store.client.fullness import LEAST_ESTIMATE, RESERVE
from turnstream.store.run.credits import CreditReason, credit_of
from turnstream.store.waits.wait_durations import for_so_long, last_opened, named_ranks, not_asked
from turnstream.store.waits.wait_facts import MAX_LEASES, MAX_NAMED, HeldMember, WaitFacts
from turnstream.types import GroupOpened, Purpose

_ORDER: Final = list(WaitKind)

UNSEALED: Final = "left without a seal"
"""The ledger's reason for a trajectory whose block ended without `seal`."""


def reasons_of(waits: WaitFacts | None, *, group: GroupOpened | None = None) -> list[WaitReason]:
    """Return the reasons for a wait for admission, a task, a refill or a version, by importance.

    Args:
        waits: state of the run; None if the store could not return it.
        group: the group that waits for admission; None stands for one of a single sample.
    """
    if waits is None:
        return []
    found = [*_of_bytes(waits, group), *_of_services(waits), *_of_members(waits)]
    if group is None or group.purpose is Purpose.TRAIN:
        found += [*_of_capacity(waits), *_of_shortage(waits)]
    return sorted(found, key=lambda reason: _ORDER.index(WaitKind(reason.kind)))


def no_leave(group: GroupOpened, why: str, *, waited_s: float) -> WaitReason:
    """A group was told to wait, for so long by now."""
    return WaitReason(
        WaitKind.NO_LEAVE,
        f"group {group.group_id} has waited {waited_s:.0f} s for leave to start: {why}",
        {"group": group.group_id, "samples": group.num_samples, "waited_s": waited_s},
    )


def store_away(why: str, *, address: str, since_s: float) -> WaitReason:
    """The store takes no calls, as it or the connection says."""
    return WaitReason(
        WaitKind.STORE_AWAY,
        f"the store at {address} has taken nothing for {since_s:.1f} s: {why}",
        {"address": address, "since_s": since_s, "why": why},
    )


def store_full(waits: WaitFacts | None, *, address: str, since_s: float) -> WaitReason:
    """The store answers, and refuses writes as it has no memory left."""
    facts: dict[str, str | int | float | None] = {"address": address, "since_s": since_s}
    if waits is None or not waits.bytes.refuses_writes:
        why = "the store is full, and refuses writes: used memory is above maxmemory"
    else:
        why = waits.bytes.why_full(is_urgent=True)
        facts |= {"server_used": waits.server_used, "server_max": waits.server_max}
        facts |= _holders(waits)
    since = f"the store at {address} has been full for {since_s:.1f} s"
    sentence = why.replace("the store is full", since, 1)
    return WaitReason(WaitKind.STORE_FULL, sentence, facts)


def _holders(waits: WaitFacts) -> dict[str, int]:
    return {
        "reserved": waits.reserved,
        "stored": waits.stored,
        "planned": waits.planned_bytes,
    }


def store_silent(*, address: str, since_s: float) -> WaitReason:
    """The store was asked, and says nothing."""
    return WaitReason(
        WaitKind.STORE_SILENT,
        f"the store at {address} was asked {since_s:.1f} s ago, and has not answered",
        {"address": address, "since_s": since_s},
    )


def no_task(why: str, waits: WaitFacts | None, *, waited_s: float) -> list[WaitReason]:
    """There was nothing to do, and what holds that."""
    facts: dict[str, str | int | float | None] = {"waited_s": waited_s}
    if waits is not None:
        facts |= {
            "prompts": waits.prompts_added,
            "left": waits.prompts_left,
            "given": waits.prompts_given,
        }
    return [WaitReason(WaitKind.NO_TASK, why, facts), *reasons_of(waits)]


def no_refill(waits: WaitFacts | None, *, waited_s: float) -> list[WaitReason]:
    """No attempt could be taken, and what holds that."""
    if waits is None:
        return []
    policy = waits.config.deadline_policy
    why = f"{waits.num_open} groups are open, and no attempt of any was granted"
    if waits.num_refills:
        why = f"the {waits.num_refills} attempts that were granted are tried by others, or here"
    elif policy != "refill":
        why = f"the run grants none: its deadline_policy is {policy!r}"
    facts = {
        "waited_s": waited_s,
        "granted": waits.num_refills,
        "open": waits.num_open,
        "deadline_policy": policy,
    }
    return [WaitReason(WaitKind.NO_REFILL, why, facts), *reasons_of(waits)]


def no_version(above: int, waits: WaitFacts | None, *, waited_s: float) -> list[WaitReason]:
    """No weights were announced, and what holds that."""
    if waits is None:
        return []
    newest = waits.newest_version
    why = "no policy version was announced"
    if newest is not None:
        why = f"the newest policy version is {newest}"
    facts = {
        "waited_s": waited_s,
        "above": above,
        "newest_version": newest,
        "stepped": waits.stepped,
    }
    why = f"{why}; {waits.stepped} steps are stepped"
    return [WaitReason(WaitKind.NO_VERSION, why, facts), *reasons_of(waits)]


def _of_services(waits: WaitFacts) -> Iterator[WaitReason]:
    """The planner and the trainer."""
    left_s = waits.planner_left_s
    if not waits.planner or left_s <= 0:
        since = f": the lease of {waits.planner} ended {-left_s:.0f} s ago"
        yield WaitReason(
            WaitKind.NO_PLANNER,
            f"no batcher plans the run{since if waits.planner else ''}",
            {"planner": waits.planner, "lease_left_s": left_s},
        )
    if waits.planned > waits.stepped:
        step = waits.stepped + 1
        trainer = f"trainer session {waits.session_epoch} has it"
        if not waits.session_epoch:
            trainer = "no trainer session has begun"
        since_s = waits.lasting.trainer_s
        yield WaitReason(
            WaitKind.TRAINER_NOT_STEPPED,
            f"step {step} is planned and not stepped; {trainer}{for_so_long(since_s)}"
            f"{not_asked(waits.behind)}",
            {
                "awaited": step,
                "planned": waits.planned,
                "session_epoch": waits.session_epoch,
                "since_s": since_s,
                "behind": named_ranks(waits.behind) or None,
            },
        )


def _of_capacity(waits: WaitFacts) -> Iterator[WaitReason]:
    """Yield the lack of capacity, by the rule of credits."""
    found = credit_of(
        waits.config,
        stepped=waits.stepped,
        num_live=waits.num_live,
        num_open=waits.num_open,
        is_closed=waits.is_closed,
        num_revised=waits.num_revised,
        paused=waits.paused,
    )
    live, most, since_s = waits.num_live, found.most, waits.lasting.opened_s
    sentence = found.sentence + last_opened(since_s)
    match found.reason:
        case CreditReason.PAUSED:
            yield WaitReason(WaitKind.RUN_PAUSED, found.sentence, {"reason": waits.paused})
        case CreditReason.CLOSED:
            facts = {"ready": waits.num_ready, "open": waits.num_open}
            yield WaitReason(WaitKind.RUN_CLOSED, found.sentence, facts)
        case CreditReason.STALENESS:
            facts = {"live": live, "most": most, "stepped": waits.stepped, "since_s": since_s}
            yield WaitReason(WaitKind.OUT_OF_CAPACITY, sentence, facts)
        case CreditReason.OPEN_GROUPS:
            facts = {"open": waits.num_open, "max_open_groups": most, "since_s": since_s}
            yield WaitReason(WaitKind.OUT_OF_CAPACITY, sentence, facts)
        case None:
            pass


def _of_bytes(waits: WaitFacts, group: GroupOpened | None) -> Iterator[WaitReason]:
    """Yield the lack of bytes for a group, by the rule of open_group.lua."""
    num_samples = 1 if group is None else group.num_samples
    needed = num_samples * max(LEAST_ESTIMATE, waits.estimate)
    held = waits.reserved + waits.stored + waits.planned_bytes
    is_urgent = waits.is_starved and (group is None or group.purpose is Purpose.TRAIN)
    by = (
        f"{waits.reserved:,} by open trajectories, {waits.stored:,} by sealed ones, "
        f"{waits.planned_bytes:,} by steps; a group needs {needed:,}"
    )
    facts = {
        "held": held,
        "planned": waits.planned_bytes,
        "needed": needed,
        "max_bytes": waits.config.max_bytes,
        "server_used": waits.server_used,
        "server_max": waits.server_max,
    }
    usable = waits.server_max * (1 - (RESERVE / 2 if is_urgent else RESERVE))
    why_full = waits.bytes._replace(needed=needed).why_full(is_urgent=is_urgent)
    if why_full:
        yield WaitReason(WaitKind.STORE_FULL, why_full, {**facts, **_holders(waits)})
    elif 0 < waits.config.max_bytes < held + needed and not is_urgent:
        sentence = f"{held:,} of max_bytes={waits.config.max_bytes:,} are held: {by}"
        yield WaitReason(WaitKind.OUT_OF_BYTES, sentence, facts)
    elif 0 < usable < waits.server_used + waits.reserved + needed:
        sentence = f"the server uses {waits.server_used:,} of its {waits.server_max:,} bytes; {by}"
        yield WaitReason(WaitKind.OUT_OF_BYTES, sentence, facts)


def _of_shortage(waits: WaitFacts) -> Iterator[WaitReason]:
    """Yield the missing groups of the next step, if the trainer waits for them."""
    if not waits.is_starved or waits.is_closed:
        return
    step, ready, needed = waits.stepped + 1, waits.num_ready, waits.config.batch_groups
    since_s, opened_s = waits.lasting.step_s, waits.lasting.opened_s
    facts: dict[str, str | int | float | None] = {"step": step, "ready": ready, "needed": needed}
    facts["since_s"] = since_s
    waiting = for_so_long(since_s, verb=" waits")
    has = f"step {step}{waiting}: {ready} of {needed} groups ready"
    if waits.num_open:
        facts["open"] = waits.num_open
        yield WaitReason(WaitKind.TOO_FEW_READY, f"{has}, {waits.num_open} open", facts)
    else:
        facts["opened_s"] = opened_s
        sentence = f"{has}, and no generator has a group open{last_opened(opened_s)}"
        yield WaitReason(WaitKind.OUT_OF_DATA, sentence, facts)
    recent = waits.recent
    if why := recent.why_low(least=needed):
        ended = ", ".join(f"{number} x {state}" for state, number in waits.untrained)
        yield WaitReason(
            WaitKind.PASS_RATE_LOW,
            why
            + (f"; trajectories that ended untrained, of the whole run: {ended}" if ended else ""),
            {
                "dropped": recent.num_dropped,
                "decided": recent.num_decided,
                "since_step": recent.since_step,
                **dict(waits.untrained),
            },
        )


def _of_members(waits: WaitFacts) -> Iterator[WaitReason]:
    """Yield the generators that are gone, and the first open trajectories."""
    for writer, members in _gone(waits)[:MAX_NAMED]:
        silent_s = -max(member.lease_left_s for member in members)
        yield WaitReason(
            WaitKind.GENERATOR_GONE,
            f"generator {writer} is gone: all {len(members)} trajectories that it holds have "
            f"lapsed, the last {silent_s:.0f} s ago",
            {"writer": writer, "open": len(members), "silent_s": silent_s},
        )
    for member in waits.members[:MAX_NAMED]:
        if waits.is_held_by_groups or member.lease_left_s <= 0:
            yield _of_member(member)


def _of_member(member: HeldMember) -> WaitReason:
    key, left_s = member.key, member.lease_left_s
    lease = f"lease renewed, {left_s:.0f} s left"
    if left_s <= 0:
        lease = f"lease lapsed {-left_s:.0f} s ago"
    due_s = member.deadline_left_s
    deadline = "" if due_s is None else f"; the deadline of its group is in {max(0.0, due_s):.0f} s"
    return WaitReason(
        WaitKind.MEMBER_OPEN if left_s > 0 else WaitKind.MEMBER_LAPSED,
        f"sample {key.sample} of group {key.group_id} is written by generator {member.writer}: "
        f"{lease}{deadline}",
        {
            "group": key.group_id,
            "sample": key.sample,
            "attempt": key.attempt,
            "writer": member.writer,
            "lease_left_s": left_s,
            "deadline_left_s": due_s,
        },
    )


def _gone(waits: WaitFacts) -> list[tuple[str, list[HeldMember]]]:
    """Generators that let all lapse that they hold, those with most first; where all is known."""
    if waits.num_leases > MAX_LEASES:
        return []
    held: dict[str, list[HeldMember]] = {}
    for member in waits.members:
        held.setdefault(member.writer, []).append(member)
    gone = [
        (writer, members)
        for writer, members in held.items()
        if all(member.lease_left_s <= 0 for member in members)
    ]
    return sorted(gone, key=lambda each: (-len(each[1]), each[0]))
