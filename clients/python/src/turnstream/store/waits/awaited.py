"""The first reasons of an error: the awaited thing, and a store that does not answer. No I/O."""

from __future__ import annotations

from turnstream.errors import WaitKind, WaitReason
from turnstream.store.waits.sentences import Fact, wait_reason
from turnstream.store.waits.wait_reasons import byte_facts, newest_policy, reasons
from turnstream.store.waits.wait_snapshot import WaitSnapshot
from turnstream.types import GroupOpened


def admission_awaited(group: GroupOpened, why: str, *, waited_s: float) -> WaitReason:
    """Return that a group waits for its admission."""
    facts: dict[str, Fact] = {"group": group.group_id, "samples": group.num_samples}
    return wait_reason(WaitKind.NO_ADMISSION, {**facts, "waited_s": waited_s}, why=why)


def store_away(why: str, *, address: str, since_s: float) -> WaitReason:
    """Return that the store takes no calls."""
    return wait_reason(WaitKind.STORE_AWAY, {"address": address, "since_s": since_s, "why": why})


def store_silent(*, address: str, since_s: float) -> WaitReason:
    """Return that the store was asked, and does not answer."""
    return wait_reason(WaitKind.STORE_SILENT, {"address": address, "since_s": since_s})


def store_full(snapshot: WaitSnapshot | None, *, address: str, since_s: float) -> WaitReason:
    """Return that the store answers, and refuses writes as it has no memory left."""
    facts: dict[str, Fact] = {"address": address, "since_s": since_s}
    since = f"the store at {address} has been full for {since_s:.1f} s"
    why = f"{since}, and refuses writes: used memory is above maxmemory"
    if snapshot is not None and snapshot.budget.why_refused:
        why = snapshot.budget.why_refused.replace("the store is full", since, 1)
        facts |= byte_facts(snapshot.budget)
    return wait_reason(WaitKind.STORE_FULL, facts, why=why)


def no_task(why: str, snapshot: WaitSnapshot | None, *, waited_s: float) -> list[WaitReason]:
    """Return that there was no task, and the causes."""
    facts: dict[str, Fact] = {"waited_s": waited_s}
    if snapshot is not None:
        prompts = snapshot.prompts
        facts |= {"prompts": prompts.num_added, "left": prompts.num_left}
        facts["given"] = prompts.num_given
    return [wait_reason(WaitKind.NO_TASK, facts, why=why), *reasons(snapshot)]


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
    facts: dict[str, Fact] = {"waited_s": waited_s, "granted": granted, "open": snapshot.num_open}
    facts["deadline_policy"] = policy
    return [wait_reason(WaitKind.NO_REFILL, facts, why=why), *reasons(snapshot)]


def no_version(above: int, snapshot: WaitSnapshot | None, *, waited_s: float) -> list[WaitReason]:
    """Return that no newer weights were announced, and the causes."""
    if snapshot is None:
        return []
    newest = snapshot.newest_version
    facts: dict[str, Fact] = {"waited_s": waited_s, "above": above, "newest_version": newest}
    facts["stepped"] = snapshot.stepped
    version = wait_reason(WaitKind.NO_VERSION, facts, newest=newest_policy(newest))
    return [version, *reasons(snapshot)]
