"""The first reasons of an error: the awaited thing, and a service that does not answer. No I/O."""

from __future__ import annotations

from turnstream.errors import WaitKind, WaitReason
from turnstream.store.waits.wait_reasons import (
    Fact,
    byte_facts,
    newest_policy,
    reasons,
    wait_reason,
)
from turnstream.store.waits.wait_snapshot import WaitSnapshot
from turnstream.types import GroupOpened


def not_ready(awaited: str, why: str, **facts: Fact) -> WaitReason:
    """Return that "task", "refill", "version", "batch" or "disk" has not come."""
    return WaitReason(WaitKind.NOT_READY, why, {"awaited": awaited, **facts})


def not_acknowledged(call: str, *, waited_s: float) -> WaitReason:
    """Return that a call of a trainer has no answer."""
    text = "{call} is not acknowledged after {waited_s:.1f} s"
    return wait_reason(WaitKind.NOT_ACKNOWLEDGED, text, {"call": call, "waited_s": waited_s})


def admission_awaited(group: GroupOpened, why: str, *, waited_s: float) -> WaitReason:
    """Return that a group waits for its admission."""
    text = "group {group} has waited {waited_s:.0f} s for admission: {why}"
    facts = {"group": group.group_id, "samples": group.num_samples, "waited_s": waited_s}
    return wait_reason(WaitKind.NO_ADMISSION, text, facts, why=why)


def store_away(*, address: str, since_s: float, why: str | None = None) -> WaitReason:
    """Return that the store takes no calls; without `why`, that it does not answer them."""
    text = "the store at {address} has taken nothing for {since_s:.1f} s: {why}"
    return _away(WaitKind.STORE_AWAY, text, "store", address, since_s, why)


def batcher_away(*, address: str, since_s: float, why: str | None = None) -> WaitReason:
    """Return that no batcher was reached; without `why`, that one does not answer."""
    text = "the batcher at {address} has sent nothing for {since_s:.1f} s: {why}"
    return _away(WaitKind.BATCHER_AWAY, text, "batcher", address, since_s, why)


def _away(
    kind: WaitKind, text: str, service: str, address: str, since_s: float, why: str | None
) -> WaitReason:
    facts: dict[str, Fact] = {"address": address, "since_s": since_s}
    if why is None:
        text = f"the {service} at {{address}} was asked {{since_s:.1f}} s ago, and has not answered"
        return wait_reason(kind, text, facts)
    return wait_reason(kind, text, {**facts, "why": why})


def store_full(snapshot: WaitSnapshot | None, *, address: str, since_s: float) -> WaitReason:
    """Return that the store answers, and refuses writes as it has no memory left."""
    facts: dict[str, Fact] = {"address": address, "since_s": since_s}
    since = f"the store at {address} has been full for {since_s:.1f} s"
    why = f"{since}, and refuses writes: used memory is above maxmemory"
    if snapshot is not None and snapshot.budget.why_refused:
        why = snapshot.budget.why_refused.replace("the store is full", since, 1)
        facts |= byte_facts(snapshot.budget)
    return wait_reason(WaitKind.STORE_FULL, "{why}", facts, why=why)


def no_task(why: str, snapshot: WaitSnapshot | None, *, waited_s: float) -> list[WaitReason]:
    """Return that there was no task, and the causes."""
    facts: dict[str, Fact] = {}
    if snapshot is not None:
        prompts = snapshot.prompts
        facts = {"prompts": prompts.num_added, "left": prompts.num_left, "given": prompts.num_given}
    return [not_ready("task", why, waited_s=waited_s, **facts), *reasons(snapshot)]


def no_refill(snapshot: WaitSnapshot | None, *, waited_s: float) -> list[WaitReason]:
    """Return that no attempt could be taken, and the causes."""
    if snapshot is None:
        return []
    granted, policy = snapshot.num_refills, snapshot.config.deadline_policy
    why = f"{snapshot.num_open} groups are open, and no attempt of any was granted"
    if granted:
        why = f"the {granted} attempts that were granted are tried by others, or here"
    elif policy != "refill":
        why = f"the run grants none: its deadline_policy is {policy!r}"
    facts = {"granted": granted, "open": snapshot.num_open, "deadline_policy": policy}
    return [not_ready("refill", why, waited_s=waited_s, **facts), *reasons(snapshot)]


def no_version(above: int, snapshot: WaitSnapshot | None, *, waited_s: float) -> list[WaitReason]:
    """Return that no newer weights were announced, and the causes."""
    if snapshot is None:
        return []
    newest = snapshot.newest_version
    why = f"{newest_policy(newest)}; {snapshot.stepped} steps are stepped"
    facts = {"above": above, "newest_version": newest, "stepped": snapshot.stepped}
    return [not_ready("version", why, waited_s=waited_s, **facts), *reasons(snapshot)]
