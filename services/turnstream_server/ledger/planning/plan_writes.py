"""The writes of a plan: from what the store holds of a step and its groups to `Changes`.

A plan is written in slices of whole groups. The first slice has the manifest and is the commit
point. The groups of all slices are checked before it, and those of the other slices are marked
after it. Only the leader changes a sealed trajectory, so that none changes in between. The field
`marking` of the frontier tells the next leader that some groups are not marked yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from turnstream.batching.fold.decisions import GroupCut
from turnstream.batching.merge.plan import GroupPlan, Manifest
from turnstream.errors import ConflictError, StoreUnavailableError
from turnstream.store.client import keys
from turnstream.store.client.stored_values import StoredHash, parsed_number, reading
from turnstream.store.client.trajectory_names import with_readable_names
from turnstream_server.ledger.core.frontier import NONE_WITHDRAWN, Withdrawn
from turnstream_server.ledger.leadership.writes import MAX_TRIES, Changes, Term, read_facts, time_ms
from turnstream_server.ledger.planning.groups import settle_groups
from turnstream_server.ledger.planning.settling import Attempt, GroupState

SLICE: Final = 3_000
"""Most trajectories of one slice, where each group counts as GROUP_WEIGHT more. A slice takes the
server about 15 ms."""

GROUP_WEIGHT: Final = 4

_REASON: Final = "its group was planned without it"
_FRONTIER: Final = (
    *("planned", "next_revision", "paused", "lineage", "withdrawn"),
    *("opened_groups", "live_groups", "planned_groups", "at_plans"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The facts in the store about the steps of a run.

    `before` and `of_step` are the entries in `batches` of the step before it, and of the step
    itself; None where it is not planned, or released. `revision` is the config in force.
    """

    frontier: StoredHash
    before: bytes | None
    of_step: bytes | None
    revision: int
    now_ms: int

    @property
    def planned(self) -> int:
        """The newest planned step."""
        return self.frontier.number("planned")


def slices_of(manifest: Manifest) -> list[Sequence[GroupPlan]]:
    """Return the groups of a plan in slices; one group at least in each."""
    ids = Counter(each.key for group in manifest.groups for each in group.trajectories)
    for key, number in ids.items():
        if number > 1:
            raise ConflictError(f"{key.readable_name} is named twice")
    slices: list[list[GroupPlan]] = []
    weight = SLICE
    for group in manifest.groups:
        own = len(group.trajectories) + GROUP_WEIGHT
        if weight + own > SLICE:
            slices.append([])
            weight = 0
        slices[-1].append(group)
        weight += own
    return [tuple(each) for each in slices]


async def read_step(term: Term, step: int) -> StepFacts:
    """Return the facts of a step."""
    known = keys.run_keys(term.run)
    values, (before, of_step), revision, now = await read_facts(
        term,
        ("HMGET", known.frontier, *_FRONTIER),
        ("HMGET", known.batches, step - 1, step),
        ("HGET", known.config, "newest"),
        ("TIME",),
    )
    fields = {name.encode(): value for name, value in zip(_FRONTIER, values, strict=True)}
    stored = {name: value for name, value in fields.items() if value is not None}
    with reading(known.config, "newest"):
        in_force = parsed_number(revision)
    return StepFacts(
        frontier=StoredHash(known.frontier, stored),
        before=before,
        of_step=of_step,
        revision=in_force,
        now_ms=time_ms(now),
    )


async def read_decided_groups(
    term: Term, groups: Sequence[GroupPlan], *, is_new: bool
) -> list[GroupState]:
    """Return the facts of some groups, and decide those of which the plan leaves attempts out.

    The attempts of each are the planned ones. The groups of a new plan are checked before anything
    is written.
    """
    for _ in range(MAX_TRIES):
        found = await read_planned_groups(term, groups)
        if is_new:
            check_groups(found)
        cut = [
            GroupCut(group_id=plan.group_id, reason=_REASON, num_granted=group.num_granted)
            for plan, group in zip(groups, found, strict=True)
            if leaves_out(group)
        ]
        if not cut:
            return found
        await settle_groups(term, cut)
    raise StoreUnavailableError(f"run {term.run}: groups changed in each of {MAX_TRIES} tries")


async def read_planned_groups(term: Term, groups: Sequence[GroupPlan]) -> list[GroupState]:
    """Return the facts about some groups; the attempts of each are the planned ones."""
    known = keys.run_keys(term.run)
    names = [keys.encode_name(each.group_id) for each in groups]
    ids = [keys.trajectory_id(each.key) for group in groups for each in group.trajectories]
    *columns, entries, held = await read_facts(
        term,
        *(("HMGET", key, *names) for key in (known.groups, known.members, known.tasks)),
        *(("HMGET", key, *ids) for key in (known.ledger, known.payload_bytes)),
    )
    attempts = map(Attempt, ids, entries, held)
    return [
        GroupState(name, *own, attempts=[next(attempts) for _ in plan.trajectories])
        for plan, name, *own in zip(groups, names, *columns, strict=True)
    ]


def leaves_out(group: GroupState) -> bool:
    """Return whether an open group may have attempts in addition to the planned ones."""
    return group.state == "open" and (group.highest > 0 or len(group.attempts) < group.num_samples)


def is_marked(group: GroupState) -> bool:
    """Return whether a group of a written plan is marked: planned, or finished since."""
    return group.state in {"", "planned"}


def check_step(facts: StepFacts, manifest: Manifest, *, manifest_hash: str) -> bool:
    """Return whether the plan can be written now.

    False if it was written before, or the step must be planned again: the run is paused, or the
    step has another config or lineage.
    """
    step = manifest.step
    if step <= facts.planned:
        known = _hash(facts.of_step)
        if known == manifest_hash:
            return False
        raise ConflictError(
            f"step {step} is planned with the manifest {known or 'of a released batch'}"
        )
    if step != facts.planned + 1:
        raise ConflictError(f"step {step} does not follow step {facts.planned}")
    newest = _hash(facts.before)
    if newest != manifest.previous_hash:
        raise ConflictError(
            f'step {facts.planned} has the manifest "{newest}", not "{manifest.previous_hash}"'
        )
    if facts.revision != manifest.config_revision:
        raise ConflictError(
            f"step {step} was planned with config revision {manifest.config_revision}, and "
            f"revision {facts.revision} is in force"
        )
    frontier = facts.frontier
    is_revised = 0 < frontier.number("next_revision") <= step
    is_other_lineage = frontier.text("lineage") != manifest.lineage
    return not (is_revised or is_other_lineage or b"paused" in frontier.fields)


def check_groups(groups: Sequence[GroupState]) -> None:
    """Check that some groups can be planned."""
    for group in groups:
        for each in group.attempts:
            if each.state != "sealed":
                entry = (each.entry or b"unknown").decode(errors="replace")
                message = f"{each.trajectory_id} is {entry}, not sealed"
                raise ConflictError(with_readable_names(message))
        if is_marked(group):
            first = group.attempts[0].trajectory_id
            message = f"group {group.name} of {first} is finished"
            raise ConflictError(with_readable_names(message))


def commit(
    facts: StepFacts,
    manifest: Manifest,
    groups: Sequence[GroupState],
    *,
    manifest_hash: str,
    record: bytes,
) -> Changes:
    """Return the writes of a plan and of its first slice of groups."""
    changes = Changes()
    step = manifest.step
    frontier = facts.frontier
    for field in ("planned", "next_revision", "paused", "lineage", "withdrawn"):
        changes.expect("frontier", field, frontier.fields.get(field.encode()))
    changes.expect("config", "newest", b"%d" % facts.revision)
    num_planned = frontier.number("planned_groups") + len(manifest.groups)
    num_dropped = frontier.number("opened_groups") - frontier.number("live_groups")
    at_plan_before = (frontier.text("at_plans") or "0:0:0").rpartition(",")[2]
    withdrawn = frontier.parsed("withdrawn", Withdrawn.parse, NONE_WITHDRAWN)
    revision = withdrawn.revision if step <= withdrawn.through_step else 0
    total = int((facts.before or b"0").partition(b":")[0]) + manifest.num_trajectories
    changes.write("XADD", "plan", f"{step}-{revision}", "r", record)
    changes.write("HSET", "batches", str(step), f"{total}:{manifest_hash}")
    changes.write("HSET", "times", f"planned:{step}", str(facts.now_ms))
    at_plans = f"{at_plan_before},{step}:{num_dropped}:{num_planned}"
    changes.write("HSET", "frontier", "planned", str(step), "at_plans", at_plans)
    changes.add("frontier", "planned_groups", len(manifest.groups))
    if len(groups) < len(manifest.groups):
        changes.write("HSET", "frontier", "marking", str(step))
    _mark(changes, groups, step=step)
    return changes


def mark(groups: Sequence[GroupState], *, step: int) -> Changes | None:
    """Return the writes that mark some groups of a written plan; None if all are marked."""
    changes = Changes()
    unmarked = [group for group in groups if not is_marked(group)]
    if not unmarked:
        return None
    _mark(changes, unmarked, step=step)
    return changes


def _mark(changes: Changes, groups: Sequence[GroupState], *, step: int) -> None:
    ids: list[str] = []
    num_bytes = 0
    for group in groups:
        changes.expect("groups", group.name, group.entry)
        if group.state == "open":
            changes.expect("members", group.name, group.members)
        ids += (each.trajectory_id for each in group.attempts)
        num_bytes += sum(each.stored_bytes for each in group.attempts)
    changes.expect_prefix("ledger", "sealed:", ids)
    move_trajectories(
        changes,
        dict.fromkeys(ids, f"planned:{step}"),
        num_planned=len(ids),
        num_bytes=num_bytes,
    )
    _finish_groups(changes, groups)


def move_trajectories(
    changes: Changes, entries: Mapping[str, str], *, num_planned: int, num_bytes: int
) -> None:
    """Add new ledger entries, and move this much from "sealed" to "planned"."""
    changes.write_each("HSET", "ledger", [word for pair in entries.items() for word in pair])
    changes.add("counts", "sealed", -num_planned)
    changes.add("counts", "planned", num_planned)
    changes.add("budget", "stored", -num_bytes)
    changes.add("budget", "planned", num_bytes)


def _finish_groups(changes: Changes, groups: Sequence[GroupState]) -> None:
    names = [group.name for group in groups]
    states = [word for each in groups for word in (each.name, f"{each.num_samples}:planned")]
    changes.write_each("HSET", "groups", states)
    changes.write_each("HDEL", "members", names)
    changes.write_each("ZREM", "deadlines", [f"group:{name}" for name in names])
    prompts = [group.task.decode() for group in groups if group.task is not None]
    changes.write_each("HDEL", "tasks", [each.name for each in groups if each.task is not None])
    changes.write_each("HDEL", "prompts", prompts)
    changes.add("prompts", "done", len(prompts))
    num_open = sum(group.state == "open" for group in groups)
    changes.add("frontier", "open_groups", -num_open)
    if num_open or prompts:
        changes.wake()


def _hash(entry: bytes | None) -> str:
    return "" if entry is None else entry.partition(b":")[2].decode()
