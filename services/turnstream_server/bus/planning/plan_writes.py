"""The writes of a plan: from what the store holds of a step and its groups to `Changes`.

A plan is written in slices of whole groups. The first slice has the manifest and is the commit
point. The groups of all slices are checked before it, and those of the other slices are marked
after it. Only the leader changes a sealed trajectory, so that none changes in between. The field
`marking` of the frontier tells the next leader that some groups are not marked yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from turnstream.batching.merge.plan import GroupPlan, Manifest
from turnstream.errors import ConflictError, CorruptRecordError
from turnstream.store.client import keys
from turnstream.store.client.stored_values import StoredHash, parsed_number, reading
from turnstream_server.bus.core.frontier import NONE_WITHDRAWN, Withdrawn
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.leadership.writes import Changes, read_facts, write
from turnstream_server.bus.planning.ending import Attempt, end_attempts, read_attempts

SLICE: Final = 3_000
"""Most trajectories of one slice, where each group counts as GROUP_WEIGHT more. A slice takes the
server about 15 ms."""

GROUP_WEIGHT: Final = 4

REST_SLICE: Final = 1_000
"""Attempts of an undecided group that one call ends."""

_REASON: Final = "its group was planned without it"
_ENDS: Final = {"open": "surplus", "awaiting_reward": "surplus"}
_FRONTIER: Final = (
    *("planned", "next_revision", "paused", "lineage", "withdrawn"),
    *("opened_groups", "live_groups", "planned_groups", "at_plans"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The facts in the store about the steps of a run.

    Attributes:
        frontier: fields of the frontier.
        before: entry of the step before it in `batches`; None for the first step.
        of_step: entry of the step itself; None where it is not planned, or released.
        revision: the config revision in force.
        now_ms: the time of the server.
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


class GroupFacts(NamedTuple):
    """The facts in the store about one group of a plan.

    Attributes:
        plan: the group in the manifest.
        state: its entry in `groups`, None for a finished one; `members` and `task` alike.
        attempts: its planned trajectories.
        rest: the other attempts of an open group, where there are any.
    """

    plan: GroupPlan
    state: bytes | None
    members: bytes | None
    task: bytes | None
    attempts: list[Attempt]
    rest: list[Attempt]

    @property
    def name(self) -> str:
        """The name of the group in keys."""
        return keys.encode_name(self.plan.group_id)

    @property
    def num_samples(self) -> int:
        """The samples of the group; it must not be finished."""
        assert self.state is not None
        return int(self.state.partition(b":")[0])

    @property
    def is_open(self) -> bool:
        """Return whether the group takes samples; a decided one has no open trajectories."""
        return self.state is not None and self.state.endswith(b":open")

    @property
    def is_planned(self) -> bool:
        """Return whether the group was marked before: finished, or planned."""
        return self.state is None or self.state.endswith(b":planned")


def slices_of(manifest: Manifest) -> list[Sequence[GroupPlan]]:
    """Return the groups of a plan in slices; one group at least in each.

    Raises:
        ConflictError: a trajectory is named twice.
    """
    ids = Counter(each.key for group in manifest.groups for each in group.trajectories)
    for key, number in ids.items():
        if number > 1:
            raise ConflictError(f"{keys.trajectory_id(key)} is named twice")
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
    """Return the facts of a step.

    Raises:
        FencedError: another planner leads the run.
    """
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
        now_ms=int(now[0]) * 1000 + int(now[1]) // 1000,
    )


async def read_decided_groups(
    term: Term, groups: Sequence[GroupPlan], *, is_new: bool
) -> list[GroupFacts]:
    """Return the facts of some groups, and decide those of which the plan leaves attempts out.

    The groups of a new plan are checked before anything is written.

    Raises:
        ConflictError: `is_new`, and a trajectory is not sealed, or a group is finished.
        FencedError: another planner leads the run.
    """
    while True:
        found = await read_groups(term, groups)
        if is_new:
            check_groups(found)
        with_rest = [each for each in found if each.rest]
        if not with_rest:
            return found
        for group in with_rest:
            changes = decide(group)
            if changes is not None:
                await write(term, changes)


async def read_groups(term: Term, groups: Sequence[GroupPlan]) -> list[GroupFacts]:
    """Return the facts of some groups of a plan.

    Raises:
        FencedError: another planner leads the run.
    """
    known = keys.run_keys(term.run)
    names = [keys.encode_name(each.group_id) for each in groups]
    ids = [keys.trajectory_id(each.key) for group in groups for each in group.trajectories]
    states, members, tasks, entries, held = await read_facts(
        term,
        *(("HMGET", key, *names) for key in (known.groups, known.members, known.tasks)),
        *(("HMGET", key, *ids) for key in (known.ledger, known.held)),
    )
    attempts = map(Attempt, ids, entries, held)
    found: list[GroupFacts] = []
    for plan, *own in zip(groups, states, members, tasks, strict=True):
        planned = [next(attempts) for _ in plan.trajectories]
        facts = GroupFacts(plan, *own, attempts=planned, rest=[])
        found.append(facts._replace(rest=await _read_rest(term, facts)))
    return found


async def _read_rest(term: Term, group: GroupFacts) -> list[Attempt]:
    """Return the attempts of an open group that the plan leaves out."""
    if not group.is_open:
        return []
    highest = _highest(group)
    if not highest and len(group.attempts) == group.num_samples:
        return []
    planned = {each.trajectory_id for each in group.attempts}
    found = await read_attempts(term, group.name, num_samples=group.num_samples, highest=highest)
    return [each for each in found if each.trajectory_id not in planned]


def _highest(group: GroupFacts) -> int:
    """Return the highest known attempt.

    Raises:
        CorruptRecordError: the entry in `members` is damaged.
    """
    try:
        return int((group.members or b":0").split(b":")[1])
    except (IndexError, ValueError):
        raise CorruptRecordError(
            f"damaged: members, field {group.name!r}: {group.members!r} is no entry of members"
        ) from None


def check_step(facts: StepFacts, manifest: Manifest, *, manifest_hash: str) -> bool:
    """Return whether the plan can be written now.

    False if it was written before, or the step must be planned again: the run is paused, or the
    step has another config or lineage.

    Raises:
        ConflictError: the step has another plan or is not the next one. Or the plan does not
            continue the chain, or has another config than the one in force.
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


def decide(group: GroupFacts) -> Changes | None:
    """Return the writes that end the attempts that a plan leaves out, and decide their group.

    The group stays open where more than REST_SLICE attempts are left; the first of them are ended.
    None where the plan leaves out nothing.
    """
    if not group.rest:
        return None
    changes = Changes()
    changes.expect("groups", group.name, group.state)
    changes.expect("members", group.name, group.members)
    held = [each for each in group.rest if each.state in _ENDS or each.reserved_bytes]
    if len(held) > REST_SLICE:
        end_attempts(changes, held[:REST_SLICE], becomes=_ENDS, reason=_REASON)
        return changes
    end_attempts(changes, group.rest, becomes=_ENDS, reason=_REASON)
    changes.write("HSET", "groups", group.name, f"{group.num_samples}:decided")
    changes.write("ZREM", "deadlines", f"group:{group.name}")
    changes.write_each("ZREM", "refills", [each.trajectory_id for each in group.rest])
    changes.add("frontier", "open_groups", -1)
    changes.wake()
    return changes


def check_groups(groups: Sequence[GroupFacts]) -> None:
    """Check that some groups can be planned.

    Raises:
        ConflictError: a trajectory is not sealed, or a group is finished.
    """
    for group in groups:
        for each in group.attempts:
            if each.state != "sealed":
                entry = (each.entry or b"unknown").decode(errors="replace")
                raise ConflictError(f"{each.trajectory_id} is {entry}, not sealed")
        if group.is_planned:
            first = group.attempts[0].trajectory_id
            raise ConflictError(f"group {group.name} of {first} is finished")


def commit(
    facts: StepFacts,
    manifest: Manifest,
    groups: Sequence[GroupFacts],
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


def mark(groups: Sequence[GroupFacts], *, step: int) -> Changes | None:
    """Return the writes that mark some groups of a written plan; None if all are marked."""
    changes = Changes()
    unmarked = [group for group in groups if not group.is_planned]
    if not unmarked:
        return None
    _mark(changes, unmarked, step=step)
    return changes


def _mark(changes: Changes, groups: Sequence[GroupFacts], *, step: int) -> None:
    ids: list[str] = []
    num_bytes = 0
    for group in groups:
        changes.expect("groups", group.name, group.state)
        if group.is_open:
            changes.expect("members", group.name, group.members)
        ids += (each.trajectory_id for each in group.attempts)
        num_bytes += sum(each.stored_bytes for each in group.attempts)
    changes.expect_prefix("ledger", "sealed:", ids)
    changes.write_each("HSET", "ledger", [*_pairs(ids, f"planned:{step}")])
    changes.add("counts", "sealed", -len(ids))
    changes.add("counts", "planned", len(ids))
    changes.add("budget", "stored", -num_bytes)
    changes.add("budget", "planned", num_bytes)
    _finish_groups(changes, groups)


def _finish_groups(changes: Changes, groups: Sequence[GroupFacts]) -> None:
    names = [group.name for group in groups]
    changes.write_each("HSET", "groups", [*_states(groups)])
    changes.write_each("HDEL", "members", names)
    changes.write_each("ZREM", "deadlines", [f"group:{name}" for name in names])
    prompts = [group.task.decode() for group in groups if group.task is not None]
    changes.write_each("HDEL", "tasks", [each.name for each in groups if each.task is not None])
    changes.write_each("HDEL", "prompts", prompts)
    changes.add("prompts", "done", len(prompts))
    num_open = sum(group.is_open for group in groups)
    changes.add("frontier", "open_groups", -num_open)
    if num_open or prompts:
        changes.wake()


def _states(groups: Sequence[GroupFacts]) -> Iterator[str]:
    for group in groups:
        yield group.name
        yield f"{group.num_samples}:planned"


def _pairs(ids: Sequence[str], value: str) -> Iterator[str]:
    for each in ids:
        yield each
        yield value


def _hash(entry: bytes | None) -> str:
    return "" if entry is None else entry.partition(b":")[2].decode()
