"""The state of a run with its scanned ledger: exact counts, and the groups that are waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import redis

from turnstream.errors import RecordError
from turnstream.records.snapshots import decode_snapshot
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import run_command
from turnstream.store.client.stored_values import reading
from turnstream.store.run import clock
from turnstream.store.waits.read_waits import parse_waits, waits_command
from turnstream.store.waits.wait_reasons import UNSEALED
from turnstream.store.waits.wait_snapshot import (
    MAX_NAMED,
    AwaitedReward,
    OpenMember,
    WaitingGroup,
    WaitSnapshot,
    lapsed_writers,
)
from turnstream.types import GroupOpened, SealedTrajectory, TrajectoryKey, TrajectoryState
from turnstream_server.bus.admin.dead_letters import read_kept
from turnstream_server.bus.core.frontier import Frontier, read_frontier
from turnstream_server.bus.core.scan import PAGE, entry_ms, hash_fields, readable_events, server_ms
from turnstream_server.bus.queries.ledger import STATES_WITH_REASON, TOP_REASONS, parse_entry
from turnstream_server.bus.release.compact_records import past_reasons
from turnstream_server.bus.sessions.observers import read_observers

_IN_GROUP: Final = frozenset(
    {
        *(TrajectoryState.SEALED, TrajectoryState.PLANNED),
        *(TrajectoryState.STEPPED, TrajectoryState.COMMITTED),
    }
)
_WITHOUT_SIGNAL: Final = (f"{TrajectoryState.SURPLUS}:", f"{TrajectoryState.EVALUATED}:")
"""Beginnings of ends that do not lower the pass rate."""

_Name = TypeVar("_Name")


def read_snapshot(client: redis.Redis, run: str) -> WaitSnapshot:
    """Return the state of a run; its parts are read one after the other.

    Raises:
        CorruptRecordError: a field is damaged; names its key.
    """
    names = keys.run_keys(run)
    frontier = read_frontier(client, run)
    groups = _read_groups(client, names)
    untrained = _scan_ledger(client, names, frontier, groups)
    for end, number in past_reasons(client, run):
        if not end.startswith(_WITHOUT_SIGNAL):
            untrained[_words(end)] += number
    snapshot = parse_waits(run, run_command(client, waits_command(run)))
    _note_refills(client, names, groups)
    waiting = {name: group for name, group in groups.items() if not group.is_ready}
    times = _Times(client, run, waiting, groups)
    return replace(
        snapshot,
        is_scanned=True,
        num_ready=len(groups) - len(waiting),
        num_waiting=len(waiting),
        groups=tuple(times.described(name, waiting[name]) for name in times.oldest),
        lapsed_writers=lapsed_writers(
            member for group in groups.values() for member in times.open_members(group)
        ),
        untrained=tuple(untrained.most_common(TOP_REASONS)),
        num_unsealed=untrained[f"{TrajectoryState.ABANDONED}: {UNSEALED}"],
        unseen_by=_unseen_by(client, run, frontier),
        dead=read_kept(client, run),
    )


@dataclass(slots=True)
class _Group:
    """A group that is not in a batch, as the ledger has it."""

    num_samples: int
    num_needed: int
    is_decided: bool
    has_refill: bool = False
    sealed: set[int] = field(default_factory=set[int])
    begun: set[int] = field(default_factory=set[int])
    open: list[tuple[TrajectoryKey, str]] = field(default_factory=list[tuple[TrajectoryKey, str]])
    awaited: list[TrajectoryKey] = field(default_factory=list[TrajectoryKey])

    @property
    def not_begun(self) -> list[int]:
        return [sample for sample in range(self.num_samples) if sample not in self.begun]

    @property
    def is_ready(self) -> bool:
        has_enough = self.is_decided or len(self.sealed) >= self.num_needed
        pending = self.open or self.awaited or self.not_begun or self.has_refill
        return has_enough or not pending

    def note(self, key: TrajectoryKey, state: TrajectoryState, rest: str) -> None:
        """Record the ledger entry of a trajectory."""
        self.begun.add(key.sample)
        if state in _IN_GROUP:
            self.sealed.add(key.sample)
        elif state is TrajectoryState.OPEN:
            self.open.append((key, keys.decode_name(rest.partition(":")[2])))
        elif state is TrajectoryState.AWAITING_REWARD:
            self.awaited.append(key)


def _read_groups(client: redis.Redis, names: keys.RunKeys) -> dict[str, _Group]:
    """Return the open groups, and the decided ones that are not planned."""
    needed = {name: int(v.partition(b":")[0]) for name, v in hash_fields(client, names.members)}
    groups: dict[str, _Group] = {}
    for name, value in hash_fields(client, names.groups):
        size, _, state = value.decode().partition(":")
        if state in {"open", "decided"}:
            groups[keys.decode_name(name)] = _Group(
                int(size), needed.get(name, int(size)), state == "decided"
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
            untrained[_words(end)] += 1
    return untrained


def _words(end: str) -> str:
    """Return an end in words.

    >>> _words("filtered:all rewards are equal")
    'filtered: all rewards are equal'
    """
    return ": ".join(end.split(":", 1))


def _note_refills(client: redis.Redis, names: keys.RunKeys, groups: Mapping[str, _Group]) -> None:
    with translating():
        refills: Any = client.zrange(names.refills, 0, -1)
    for name in refills:
        group_id = keys.parse_trajectory_id(name.decode()).group_id
        if group_id in groups:
            groups[group_id].has_refill = True


def _unseen_by(client: redis.Redis, run: str, frontier: Frontier) -> str:
    """Return the observers that alone prevent the release of the oldest step."""
    if frontier.released >= frontier.committed:
        return ""
    return ", ".join(
        f"{each.name!r} has seen step {each.seen}, and is forgotten in {each.left_s:.0f} s"
        for each in read_observers(client, run)
        if each.left_s > 0 and each.seen <= frontier.released
    )


class _Times:
    """Leases, deadlines and ages of the members of groups.

    Attributes:
        oldest: names of the groups that have waited longest; one of unknown age is an old one.
    """

    def __init__(
        self,
        client: redis.Redis,
        run: str,
        waiting: Mapping[str, _Group],
        groups: Mapping[str, _Group],
    ) -> None:
        names = keys.run_keys(run)
        self._now_ms = server_ms(client)
        self._leases = _scores(
            client,
            names.leases,
            {key.trajectory_id: key for group in groups.values() for key, _ in group.open},
        )
        awaited = {key for group in waiting.values() for key in group.awaited}
        self._opened_ms, self._sealed_ms = _event_times(client, run, waiting, awaited)
        self.oldest = sorted(waiting, key=lambda name: (self._opened_ms.get(name, 0), name))
        self.oldest = self.oldest[:MAX_NAMED]
        due = {f"group:{keys.encode_name(name)}": name for name in self.oldest}
        self._group_due_ms = _scores(client, names.deadlines, due)
        due_rewards = {f"reward:{key.trajectory_id}": key for key in awaited}
        self._reward_due_ms = _scores(client, names.deadlines, due_rewards)
        with translating():
            fields: Any = client.hmget(names.clock, *clock.FIELDS)
        self._run_ms = clock.run_ms(fields, now_ms=self._now_ms)

    def described(self, name: str, group: _Group) -> WaitingGroup:
        """Return a waiting group with a limited number of its members."""
        return WaitingGroup(
            group_id=name,
            age_s=_ago_s(self._opened_ms.get(name), self._now_ms),
            num_sealed=len(group.sealed),
            num_needed=group.num_needed,
            deadline_left_s=_left_s(self._group_due_ms.get(name), self._run_ms),
            open_members=tuple(self.open_members(group)[:MAX_NAMED]),
            awaited=tuple(
                AwaitedReward(
                    key=key,
                    since_s=_ago_s(self._sealed_ms.get(key), self._now_ms),
                    deadline_left_s=_left_s(self._reward_due_ms.get(key), self._run_ms),
                )
                for key in sorted(group.awaited)[:MAX_NAMED]
            ),
            not_started=tuple(group.not_begun[:MAX_NAMED]),
        )

    def open_members(self, group: _Group) -> list[OpenMember]:
        """Return the members of a group that have a lease, the longest lapsed first."""
        leases = self._leases
        held = sorted((leases[key], key, writer) for key, writer in group.open if key in leases)
        return [
            OpenMember(key=key, writer=writer, lease_left_s=(end_ms - self._now_ms) / 1_000)
            for end_ms, key, writer in held
        ]


def _event_times(
    client: redis.Redis, run: str, groups: Mapping[str, _Group], awaited: Iterable[TrajectoryKey]
) -> tuple[dict[str, int], dict[TrajectoryKey, int]]:
    """Return when groups were opened and trajectories sealed, as far as known.

    If the event of a group is gone, the planner's snapshot has the time.
    """
    opened_ms: dict[str, int] = {}
    sealed_ms: dict[TrajectoryKey, int] = {}
    if not groups:
        return opened_ms, sealed_ms
    for entry_id, event in readable_events(client, run):
        if isinstance(event, GroupOpened) and event.group_id in groups:
            opened_ms.setdefault(event.group_id, entry_ms(entry_id))
        elif isinstance(event, SealedTrajectory) and event.key in awaited:
            sealed_ms.setdefault(event.key, entry_ms(entry_id))
    if opened_ms.keys() < groups.keys():
        snapshot_ms = openings_in_snapshot(client, run)
        opened_ms = {name: snapshot_ms[name] for name in groups if name in snapshot_ms} | opened_ms
    return opened_ms, sealed_ms


def openings_in_snapshot(client: redis.Redis, run: str) -> dict[str, int]:
    """Return when open and ready groups were opened, in ms, from the snapshot of the planner.

    A group whose plan was withdrawn has no time there, and a damaged snapshot has none.
    """
    name = keys.run_keys(run).snapshot
    with reading(name), translating():
        record: Any = client.hget(name, "record")
    if record is None:
        return {}
    try:
        with reading(name, "record"):
            groups = decode_snapshot(record).fold.groups.items()
            opened_ms = {group_id: entry_ms(group.opened_by) for group_id, group in groups}
    except RecordError:
        return {}  # damaged, or of a newer release
    return {group_id: ms for group_id, ms in opened_ms.items() if ms}


def _scores(client: redis.Redis, name: str, members: Mapping[str, _Name]) -> dict[_Name, int]:
    """Return the scores of those members of a sorted set that exist."""
    words = list(members)
    found: dict[_Name, int] = {}
    for start in range(0, len(words), PAGE):
        page = words[start : start + PAGE]
        with translating():
            scores: Any = client.zmscore(name, page)
        found.update({members[w]: int(s) for w, s in zip(page, scores, strict=True) if s})
    return found


def _ago_s(ms: int | None, now_ms: int) -> float | None:
    return None if ms is None else max(0, now_ms - ms) / 1_000


def _left_s(ms: int | None, now_ms: int) -> float | None:
    return None if ms is None else (ms - now_ms) / 1_000
