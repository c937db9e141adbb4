"""The state of a run with its scanned ledger: exact counts, and the groups that are waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import redis

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.members import GroupMembers
from turnstream.batching.scoring.filters import is_compared
from turnstream.errors import RecordError
from turnstream.records.snapshots import decode_snapshot
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import run_command
from turnstream.store.run import clock
from turnstream.store.waits.read_waits import parse_waits, waits_command
from turnstream.store.waits.wait_reasons import UNSEALED
from turnstream.store.waits.wait_snapshot import (
    MAX_NAMED,
    MemberState,
    WaitingMember,
    WaitSnapshot,
    lapsed_writers,
    open_member,
)
from turnstream.types import GroupOpened, SealedTrajectory, TrajectoryKey, TrajectoryState
from turnstream_server.ledger.admin.dead_letters import read_kept
from turnstream_server.ledger.core.frontier import Frontier, read_frontier
from turnstream_server.ledger.core.scan import (
    PAGE,
    entry_ms,
    hash_fields,
    readable_events,
    server_ms,
)
from turnstream_server.ledger.planning.manifests import read_plan
from turnstream_server.ledger.queries.ledger import STATES_WITH_REASON, TOP_REASONS, parse_entry
from turnstream_server.ledger.release.compact_records import past_reasons
from turnstream_server.ledger.release.release_writes import counted_reason
from turnstream_server.ledger.sessions.observers import read_observers

_IN_GROUP: Final = frozenset(
    {
        *(TrajectoryState.SEALED, TrajectoryState.PLANNED),
        *(TrajectoryState.STEPPED, TrajectoryState.COMMITTED),
    }
)
_WITHOUT_SIGNAL: Final = (f"{TrajectoryState.SURPLUS}:", f"{TrajectoryState.EVALUATED}:")
"""Beginnings of ends that do not lower the pass rate."""


def read_snapshot(client: redis.Redis, run: str) -> WaitSnapshot:
    """Return the state of a run; its parts are read one after the other.

    Raises:
        CorruptRecordError: a field is damaged; names its key.
    """
    names = keys.run_keys(run)
    frontier = read_frontier(client, run)
    groups = _read_groups(client, names)
    untrained = _scan_ledger(client, names, frontier, groups)
    snapshot = parse_waits(run, run_command(client, waits_command(run)))
    since_ms = _read_events(client, run, snapshot.config, groups)
    for end, number in past_reasons(client, run):
        if not end.startswith(_WITHOUT_SIGNAL):
            untrained[end.replace(":", ": ", 1)] += number
    waiting = {name: group for name, group in groups.items() if not group.is_ready}
    times = _read_times(client, run, groups=groups, waiting=waiting, since_ms=since_ms)
    oldest = sorted(waiting, key=lambda name: (times.since_ms.get(name, 0), name))[:MAX_NAMED]
    return replace(
        snapshot,
        is_scanned=True,
        num_ready=len(groups) - len(waiting),
        num_waiting=len(waiting),
        members=(
            *(each for name in oldest for each in _members(name, waiting[name], times)),
            *(each for each in snapshot.members if each.state is MemberState.GRANTED),
        ),
        lapsed_writers=lapsed_writers(
            member for group in groups.values() for member in _open_members(group, times)
        ),
        untrained=tuple(untrained.most_common(TOP_REASONS)),
        num_unsealed=untrained[f"{TrajectoryState.ABANDONED}: {UNSEALED}"],
        unseen_by=_unseen_by(client, run, frontier),
        dead=read_kept(client, run),
        num_flat_groups=_num_flat_groups(client, run, frontier, snapshot.config),
    )


def _num_flat_groups(
    client: redis.Redis, run: str, frontier: Frontier, config: BatchingConfig
) -> int:
    """Return the groups of the newest batch if all its advantages are 0; else, or with gae, 0."""
    try:
        stored = read_plan(client, run, frontier.planned)
    except RecordError:
        return 0
    if stored is None or config.estimator == "gae":
        return 0
    members = [each for group in stored.manifest.groups for each in group.trajectories]
    is_flat = not any(each.advantage or any(each.turn_advantages) for each in members)
    return len(stored.manifest.groups) if is_flat else 0


@dataclass(slots=True, kw_only=True)
class _Group:
    """A group that is not in a batch, as the ledger has it."""

    num_samples: int
    num_needed: int
    is_decided: bool
    has_refill: bool
    sealed: set[int] = field(default_factory=set[int])
    started: set[int] = field(default_factory=set[int])
    open: list[tuple[TrajectoryKey, str]] = field(default_factory=list[tuple[TrajectoryKey, str]])
    awaited: list[TrajectoryKey] = field(default_factory=list[TrajectoryKey])

    @property
    def not_started(self) -> list[int]:
        return [sample for sample in range(self.num_samples) if sample not in self.started]

    @property
    def is_ready(self) -> bool:
        has_enough = self.is_decided or len(self.sealed) >= self.num_needed
        pending = self.open or self.awaited or self.not_started or self.has_refill
        return has_enough or not pending

    def note(self, key: TrajectoryKey, state: TrajectoryState, rest: str) -> None:
        """Record the ledger entry of a trajectory."""
        self.started.add(key.sample)
        if state in _IN_GROUP:
            self.sealed.add(key.sample)
        elif state is TrajectoryState.OPEN:
            self.open.append((key, keys.decode_name(rest.partition(":")[2])))
        elif state is TrajectoryState.AWAITING_REWARD:
            self.awaited.append(key)


def _read_groups(client: redis.Redis, names: keys.RunKeys) -> dict[str, _Group]:
    needed = {name: int(v.partition(b":")[0]) for name, v in hash_fields(client, names.members)}
    with translating():
        refills: Any = client.zrange(names.refills, 0, -1)
    refilled = {keys.parse_trajectory_id(name.decode()).group_id for name in refills}
    groups: dict[str, _Group] = {}
    for name, value in hash_fields(client, names.groups):
        size, _, state = value.decode().partition(":")
        if state in {"open", "decided"}:
            group_id = keys.decode_name(name)
            groups[group_id] = _Group(
                num_samples=int(size),
                num_needed=needed.get(name, int(size)),
                is_decided=state == "decided",
                has_refill=group_id in refilled,
            )
    return groups


def _scan_ledger(
    client: redis.Redis, names: keys.RunKeys, frontier: Frontier, groups: Mapping[str, _Group]
) -> Counter[str]:
    """Add the trajectories to their groups; return how many ended untrained, by reason."""
    untrained: Counter[str] = Counter()
    for trajectory_id, value in hash_fields(client, names.ledger):
        state, rest = parse_entry(value, frontier)
        key = keys.parse_trajectory_id(trajectory_id)
        if key.group_id in groups:
            groups[key.group_id].note(key, state, rest)
        end = f"{state}:{rest}"
        if state in STATES_WITH_REASON and not end.startswith(_WITHOUT_SIGNAL):
            untrained[f"{state}: {counted_reason(state, rest)}"] += 1
    return untrained


def _read_events(
    client: redis.Redis, run: str, config: BatchingConfig, groups: Mapping[str, _Group]
) -> dict[str | TrajectoryKey, int]:
    """Return since when groups are open and rewards awaited, in ms, as far as known."""
    leaves_out = config.masked_reward == "leave_out"
    read = {name: group for name, group in groups.items() if leaves_out or not group.is_ready}
    if not read:
        return {}

    def leave_out(sealed: SealedTrajectory) -> None:
        if leaves_out and sealed.key.group_id in read and not is_compared(sealed, config):
            read[sealed.key.group_id].sealed.discard(sealed.key.sample)

    names = {keys.encode_name(each) for each in read} if leaves_out else set[str]()
    awaited = {key for group in read.values() for key in group.awaited}
    ids = {each.trajectory_id for each in awaited}
    since_ms: dict[str | TrajectoryKey, int] = {}
    found = readable_events(
        client, run, is_wanted=lambda each: each in ids or each.partition("/")[0] in names
    )
    for entry_id, event in found:
        if isinstance(event, GroupOpened) and event.group_id in read:
            since_ms.setdefault(event.group_id, entry_ms(entry_id))
        elif isinstance(event, SealedTrajectory):
            leave_out(event)
            if event.key in awaited:
                since_ms.setdefault(event.key, entry_ms(entry_id))
    if leaves_out or any(name not in since_ms for name in read):
        known = _groups_in_snapshot(client, run)
        for sealed in (each for group in known.values() for each in group.ordered):
            leave_out(sealed)
        since_ms = {**_openings(known), **since_ms}
    return since_ms


def _unseen_by(client: redis.Redis, run: str, frontier: Frontier) -> str:
    """Return the observers that alone prevent the release of the oldest step."""
    if frontier.released >= frontier.committed:
        return ""
    return ", ".join(
        f"{each.name!r} has seen step {each.seen}, and expires in {each.left_s:.0f} s"
        for each in read_observers(client, run)
        if each.left_s > 0 and each.seen <= frontier.released
    )


class _Times(NamedTuple):
    """Leases by the store's clock, deadlines by the run's, and the beginnings of waits, in ms."""

    now_ms: int
    run_ms: int
    leases: dict[str, int]
    deadlines: dict[str, int]
    since_ms: Mapping[str | TrajectoryKey, int]

    def ago_s(self, name: str | TrajectoryKey) -> float | None:
        """Return the seconds since a wait began."""
        since_ms = self.since_ms.get(name)
        return None if since_ms is None else max(0, self.now_ms - since_ms) / 1_000

    def left_s(self, deadline: str) -> float | None:
        """Return the seconds until a deadline."""
        due_ms = self.deadlines.get(deadline)
        return None if due_ms is None else (due_ms - self.run_ms) / 1_000


def _read_times(
    client: redis.Redis,
    run: str,
    *,
    groups: Mapping[str, _Group],
    waiting: Mapping[str, _Group],
    since_ms: Mapping[str | TrajectoryKey, int],
) -> _Times:
    names = keys.run_keys(run)
    now_ms = server_ms(client)
    with translating():
        fields: Any = client.hmget(names.clock, *clock.FIELDS)
    awaited = {key for group in waiting.values() for key in group.awaited}
    open_ids = [key.trajectory_id for group in groups.values() for key, _ in group.open]
    deadlines = [*map(_group_deadline, waiting), *map(_reward_deadline, awaited)]
    return _Times(
        now_ms=now_ms,
        run_ms=clock.run_ms(fields, now_ms=now_ms),
        leases=_scores(client, names.leases, open_ids),
        deadlines=_scores(client, names.deadlines, deadlines),
        since_ms=since_ms,
    )


def _openings(groups: Mapping[str, GroupMembers]) -> dict[str | TrajectoryKey, int]:
    """Return when groups were opened, in ms; one whose plan was withdrawn has no time."""
    return {name: ms for name, group in groups.items() if (ms := entry_ms(group.opened_by))}


def _groups_in_snapshot(client: redis.Redis, run: str) -> dict[str, GroupMembers]:
    """Return the open and ready groups of the planner's snapshot; none of a damaged one."""
    with translating():
        record: Any = client.hget(keys.run_keys(run).snapshot, "record")
    try:
        return {} if record is None else decode_snapshot(record).fold.groups
    except RecordError:
        return {}


def _group_deadline(group_id: str) -> str:
    return f"group:{keys.encode_name(group_id)}"


def _reward_deadline(key: TrajectoryKey) -> str:
    return f"reward:{key.trajectory_id}"


def _scores(client: redis.Redis, name: str, members: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for start in range(0, len(members), PAGE):
        page = members[start : start + PAGE]
        with translating():
            scores: Any = client.zmscore(name, page)
        found.update({each: int(s) for each, s in zip(page, scores, strict=True) if s})
    return found


def _members(name: str, group: _Group, times: _Times) -> Iterator[WaitingMember]:
    """Yield the samples that a group waits for, a limited number of each state."""
    unrewarded = [
        WaitingMember(key=key, state=MemberState.UNREWARDED)
        for key in sorted(group.awaited)[:MAX_NAMED]
    ]
    not_started = [
        WaitingMember(key=TrajectoryKey(name, sample), state=MemberState.NOT_STARTED)
        for sample in group.not_started[:MAX_NAMED]
    ]
    for each in (*_open_members(group, times)[:MAX_NAMED], *unrewarded, *not_started):
        is_sealed = each.state is MemberState.UNREWARDED
        deadline = _reward_deadline(each.key) if is_sealed else _group_deadline(name)
        yield replace(
            each,
            since_s=times.ago_s(each.key if is_sealed else name),
            deadline_left_s=times.left_s(deadline),
            num_sealed=len(group.sealed),
            num_needed=group.num_needed,
        )


def _open_members(group: _Group, times: _Times) -> list[WaitingMember]:
    """Return the members of a group that have a lease, the longest lapsed first."""
    members = [
        open_member(key, writer, left_ms=end_ms - times.now_ms)
        for key, writer in group.open
        if (end_ms := times.leases.get(key.trajectory_id)) is not None
    ]
    return sorted(members, key=lambda each: (each.lease_left_s, each.key))
