"""The first reasons of an error: the awaited thing, and a store that does not answer. No I/O."""

from __future__ import annotations

from turnstream.errors import WaitKind, WaitReason
from turnstream.store.waits.wait_reasons import Fact, byte_facts, newest_policy, reasons
from turnstream.store.waits.wait_snapshot import WaitSnapshot
from turnstream.types import GroupOpened


def admission_awaited(group: GroupOpened, why: str, *, waited_s: float) -> WaitReason:
    """Return that a group waits for its admission."""
    return WaitReason(
        WaitKind.NO_LEAVE,
        f"group {group.group_id} has waited {waited_s:.0f} s for leave to start: {why}",
        {"group": group.group_id, "samples": group.num_samples, "waited_s": waited_s},
    )


def store_away(why: str, *, address: str, since_s: float) -> WaitReason:
    """Return that the store takes no calls."""
    return WaitReason(
        WaitKind.STORE_AWAY,
        f"the store at {address} has taken nothing for {since_s:.1f} s: {why}",
        {"address": address, "since_s": since_s, "why": why},
    )


def store_full(snapshot: WaitSnapshot | None, *, address: str, since_s: float) -> WaitReason:
    """Return that the store answers, and refuses writes as it has no memory left."""
    facts: dict[str, Fact] = {"address": address, "since_s": since_s}
    since = f"the store at {address} has been full for {since_s:.1f} s"
    if snapshot is None or not snapshot.bytes_for().refuses_writes:
        sentence = f"{since}, and refuses writes: used memory is above maxmemory"
        return WaitReason(WaitKind.STORE_FULL, sentence, facts)
    why = snapshot.bytes_for().why_full(is_urgent=True)
    sentence = why.replace("the store is full", since, 1)
    return WaitReason(WaitKind.STORE_FULL, sentence, facts | byte_facts(snapshot))


def store_silent(*, address: str, since_s: float) -> WaitReason:
    """Return that the store was asked, and does not answer."""
    return WaitReason(
        WaitKind.STORE_SILENT,
        f"the store at {address} was asked {since_s:.1f} s ago, and has not answered",
        {"address": address, "since_s": since_s},
    )


def no_task(why: str, snapshot: WaitSnapshot | None, *, waited_s: float) -> list[WaitReason]:
    """Return that there was no task, and the causes."""
    facts: dict[str, Fact] = {"waited_s": waited_s}
    if snapshot is not None:
        facts |= {
            "prompts": snapshot.prompts_added,
            "left": snapshot.prompts_left,
            "given": snapshot.prompts_given,
        }
    return [WaitReason(WaitKind.NO_TASK, why, facts), *reasons(snapshot)]


def no_refill(snapshot: WaitSnapshot | None, *, waited_s: float) -> list[WaitReason]:
    """Return that no attempt could be taken, and the causes."""
    if snapshot is None:
        return []
    policy = snapshot.config.deadline_policy
    why = f"{snapshot.num_open} groups are open, and no attempt of any was granted"
    if snapshot.num_refills:
        why = f"the {snapshot.num_refills} attempts that were granted are tried by others, or here"
    elif policy != "refill":
        why = f"the run grants none: its deadline_policy is {policy!r}"
    facts: dict[str, Fact] = {
        "waited_s": waited_s,
        "granted": snapshot.num_refills,
        "open": snapshot.num_open,
        "deadline_policy": policy,
    }
    return [WaitReason(WaitKind.NO_REFILL, why, facts), *reasons(snapshot)]


def no_version(above: int, snapshot: WaitSnapshot | None, *, waited_s: float) -> list[WaitReason]:
    """Return that no newer weights were announced, and the causes."""
    if snapshot is None:
        return []
    newest, stepped = snapshot.newest_version, snapshot.stepped
    why = f"{newest_policy(newest)}; {stepped} steps are stepped"
    facts = {"waited_s": waited_s, "above": above, "newest_version": newest, "stepped": stepped}
    return [WaitReason(WaitKind.NO_VERSION, why, facts), *reasons(snapshot)]
