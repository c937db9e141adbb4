"""I1: the ledger, the counts, the leases, the groups, the prompts and the bytes add up."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from simulator.checks.run_writes import RunWrites, Violations

_HOLDING = (b"open:", b"sealed:", b"awaiting_reward:")
_TAKING = (b":open", b":evaluating")


def ledger_adds_up(writes: RunWrites) -> Violations:
    """The counts are those of the ledger and of what left it, and add up to the accepted."""
    counts = {name.decode(): int(number) for name, number in writes.hash("counts").items()}
    accepted = counts.pop("accepted")
    for other in ("late_rewards", "dead_bytes"):
        counts.pop(other, None)
    if sum(counts.values()) != accepted or min(counts.values(), default=0) < 0:
        yield f"I1: {accepted} are accepted, but the counts are {counts}"
    found = Counter(entry.partition(b":")[0].decode() for entry in writes.hash("ledger").values())
    for reason, number in writes.hash("reasons").items():
        found[reason.partition(b":")[0].decode()] += int(number)
    planned = found.pop("planned", 0)
    counted = {name: number for name, number in counts.items() if number and name != "planned"}
    if counted != dict(found):
        yield f"I1: the counts are {counted}, the ledger has {dict(found)}"
    total = sum(each.num_trajectories for each, _ in writes.manifests.values())
    known = counts.get("planned", 0)
    is_marking = b"marking" in writes.hash("frontier")  # some groups of the newest plan
    if not planned <= known <= total or (known < total and not is_marking):
        yield f"I1: {counts.get('planned', 0)} are counted as planned, {total} are in plans"
    yield from _leases_hold(writes)
    yield from _groups_are_counted(writes)
    yield from _bytes_add_up(writes)


def _leases_hold(writes: RunWrites) -> Violations:
    leases: Any = writes.value("leases")
    held = set(leases.scores) if leases is not None else set[bytes]()
    ledger = writes.hash("ledger").items()
    if held != (opened := {name for name, entry in ledger if entry.startswith(b"open:")}):
        yield f"what is open has a lease, and nothing else has: {held ^ opened}"


def _bytes_add_up(writes: RunWrites) -> Violations:
    """Bytes are held for open or stored payload, and their sums are correct."""
    ledger, groups, held = (writes.hash(name) for name in ("ledger", "groups", "payload_bytes"))
    sums = Counter[str]()
    for name, size in held.items():
        entry = ledger.get(name)
        if entry is None and not groups.get(name.partition(b"/")[0], b"").endswith(_TAKING):
            yield f"bytes are held for {name!r}, which is over"
        part = "planned" if entry is not None and entry.startswith(b"planned:") else "stored"
        sums["reserved" if size.startswith(b"r") else part] += int(size.removeprefix(b"r"))
    budget = {name.decode(): int(number) for name, number in writes.hash("budget").items()}
    found = {part: budget.get(part, 0) for part in ("reserved", "stored", "planned")}
    if found != {part: sums[part] for part in found}:
        yield f"the bytes held are {dict(sums)}, the sums say {found}"
    for name, entry in ledger.items():
        if entry.startswith(_HOLDING) and name not in held:
            yield f"{name!r} is {entry!r} and holds no bytes"


def _groups_are_counted(writes: RunWrites) -> Violations:
    frontier, groups = writes.hash("frontier"), writes.hash("groups")
    over = len(b"".join(writes.hash("finished_groups").values())) // 8
    opened = int(frontier[b"opened_groups"]) + len(writes.evals)
    if opened != len(groups) + over:
        yield f"{opened} groups were opened: {len(groups)} and {over}"
    num_open = sum([entry.endswith(b":open") for entry in groups.values()])
    if num_open != int(frontier.get(b"open_groups", 0)):
        yield f"{frontier.get(b'open_groups')!r} groups are counted as open, {num_open} are"
    # A revision ends no group that was opened before it; one whose member died is opened again.
    most_open = max(each.max_open_groups or math.inf for each in writes.shared.ever_in_force)
    if num_open > most_open and not writes.shared.rotten:
        yield f"{num_open} groups are open, {most_open} may be"
    yield from _prompts_are_counted(writes, groups)
    planned = sum(writes.num_groups(step) for step in writes.manifests)
    counted = int(frontier.get(b"planned_groups", 0))
    if counted != planned:
        yield f"{counted} groups are counted as planned, {planned} are"
    # A rollback or a revision lowers the limit, and ends no group that was let in before it.
    live = int(frontier[b"live_groups"])
    if not 0 <= live <= (most := writes.note_most_live()):
        yield f"{live} groups are live, {most} are allowed"


def _prompts_are_counted(writes: RunWrites, groups: dict[bytes, bytes]) -> Violations:
    """Each prompt is left, given out as a group that may be trained, or done."""
    prompts = writes.hash("prompts")
    again: Any = writes.value("retry")
    waiting: set[bytes] = set() if again is None else set(again.scores)
    tasks = writes.hash("tasks")
    added, last, done = (int(prompts.get(n, 0)) for n in (b"added", b"next", b"done"))
    if len(tasks) != last - len(waiting) - done or len({*tasks.values()}) != len(tasks):
        yield f"{last} prompts were given out, {done} done, {waiting} wait, but tasks: {tasks}"
    if len([n for n in prompts if n.isdigit()]) != added - done:
        yield f"{added} prompts were added, {done} are done, {[*prompts]} are there"
    for name, number in tasks.items():
        if number in waiting or not groups.get(name, b"").endswith((b":open", b":decided")):
            yield f"prompt {number!r} is given out as {name!r}: {groups.get(name)!r}"


def are_evals_open(writes: RunWrites) -> bool:
    """Return whether an evaluation is unfinished; no run waits for it."""
    return any(entry.endswith(b":evaluating") for entry in writes.hash("groups").values())


def is_unfinished(writes: RunWrites) -> bool:
    return any(entry.startswith(_HOLDING) for entry in writes.hash("ledger").values())
