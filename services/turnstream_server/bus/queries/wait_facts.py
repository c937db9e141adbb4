"""The state of a run, read from the store for `wait_reasons`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import redis

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.capacity import most_live_groups
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.run import clock
from turnstream.store.run.configs import read_config
from turnstream.store.run.runs import newest_version
from turnstream.store.run.tasks import read_prompt_counts
from turnstream.store.waits.wait_durations import (
    RUN_FIELDS,
    Lasting,
    lasting,
    ranks_behind,
    step_fields,
)
from turnstream.store.waits.wait_reasons import UNSEALED
from turnstream.types import GroupOpened, SealedTrajectory, TrajectoryKey, TrajectoryState
from turnstream_server.bus.admin.dead_letters import read_kept
from turnstream_server.bus.core.frontier import Frontier, read_frontier
from turnstream_server.bus.core.group_open_times import openings_in_snapshot
from turnstream_server.bus.core.scan import PAGE, entry_ms, hash_fields, readable_events, server_ms
from turnstream_server.bus.queries.budget import read_budget
from turnstream_server.bus.queries.health import read_store_trouble
from turnstream_server.bus.queries.run_snapshot import (
    AwaitedReward,
    OpenMember,
    OpenRefill,
    RunSnapshot,
    SilentWriter,
    WaitingGroup,
)
from turnstream_server.bus.queries.states import STATES_WITH_REASON, TOP_REASONS, parse_entry
from turnstream_server.bus.release.compact_records import past_reasons

MAX_GROUPS: Final = 8
MAX_MEMBERS: Final = 8
"""Members of one group and one kind."""
MAX_REFILLS: Final = 8
MAX_SILENT: Final = 8

_IN_GROUP: Final = frozenset(
    {
        *(TrajectoryState.SEALED, TrajectoryState.PLANNED),
        *(TrajectoryState.STEPPED, TrajectoryState.COMMITTED),
    }
)

_Name = TypeVar("_Name")
_SAYS_NOTHING: Final = (f"{TrajectoryState.SURPLUS}:", f"{TrajectoryState.EVALUATED}:")
"""Beginnings of ends that say nothing of the pass rate."""


@dataclass(slots=True)
class _Group:
    """A group that is not over, as the ledger has it."""

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
        """Take in what the ledger says of a trajectory."""
        self.begun.add(key.sample)
        if state in _IN_GROUP:
            self.sealed.add(key.sample)
        elif state is TrajectoryState.OPEN:
            self.open.append((key, keys.decode_name(rest.partition(":")[2])))
        elif state is TrajectoryState.AWAITING_REWARD:
            self.awaited.append(key)


def read_snapshot(client: redis.Redis, run: str) -> RunSnapshot:
    """Return the state of a run; its parts are read one after the other."""
    names = keys.run_keys(run)
    frontier = read_frontier(client, run)
    _, config = read_config(client, run)
    groups = _read_groups(client, names)
    untrained = _read_ledger(client, names, frontier, groups)
    refills = _read_refills(client, names)
    for key, _ in refills:
        if key.group_id in groups:
            groups[key.group_id].has_refill = True
    waiting = {name: group for name, group in groups.items() if not group.is_ready}
    for end, number in past_reasons(client, run):
        if not end.startswith(_SAYS_NOTHING):
            untrained[_words(end)] += number
    version = newest_version(client, run)
    now_ms = server_ms(client)
    leases = _lease_ends(client, names, groups.values())
    return RunSnapshot(
        run=run,
        frontier=frontier,
        batch_groups=config.batch_groups,
        max_planned_ahead=config.max_planned_ahead,
        most_live_groups=_most_live_groups(config, frontier),
        max_open_groups=config.max_open_groups,
        prompts=read_prompt_counts(client, run),
        num_ready=sum(group.is_ready for group in groups.values()),
        num_waiting=len(waiting),
        groups=_oldest(client, run, waiting, leases, now_ms),
        refills=_open_refills(refills, now_ms),
        silent=_silent(groups.values(), leases, now_ms),
        untrained=tuple(untrained.most_common(TOP_REASONS)),
        num_unsealed=untrained[f"{TrajectoryState.ABANDONED}: {UNSEALED}"],
        newest_version=None if version is None else version.version,
        budget=read_budget(client, run),
        store_trouble=read_store_trouble(client),
        lasting=_lasting(client, names, frontier, now_ms),
        behind=_ranks_behind(client, names, frontier),
        dead=read_kept(client, run),
        **_planner(client, names, now_ms),
    )


def _most_live_groups(config: BatchingConfig, frontier: Frontier) -> int:
    return most_live_groups(
        frontier.stepped,
        batch_groups=config.batch_groups,
        max_staleness=config.max_staleness,
        num_revised=frontier.num_revised_groups,
    )


def _lasting(client: redis.Redis, names: keys.RunKeys, frontier: Frontier, now_ms: int) -> Lasting:
    with translating():
        run: Any = client.hmget(names.frontier, *RUN_FIELDS)
        step: Any = client.hmget(names.times, *step_fields(frontier.stepped))
    return lasting(now_ms, run, step)


def _ranks_behind(client: redis.Redis, names: keys.RunKeys, frontier: Frontier) -> tuple[int, ...]:
    """Return the ranks of an active session that have not asked for the next step."""
    if not frontier.has_session:
        return ()
    with translating():
        ranks: Any = client.hgetall(names.ranks)
    return ranks_behind(ranks, dp_world_size=frontier.dp_world_size, step=frontier.stepped + 1)


def _planner(client: redis.Redis, names: keys.RunKeys, now_ms: int) -> dict[str, Any]:
    """Name of the planner, the seconds left of its lease, and its troubles.

    A parked run needs no planner: then it is the one that parked it, with its whole lease.
    """
    troubles = ("planning_trouble", "release_trouble")
    with translating():
        reply: Any = client.hmget(
            names.leader, "owner", "expires_ms", "lease_ms", "parked", *troubles
        )
    owner, expires_ms, lease_ms, parked, *said = reply
    if parked and parked == b" ".join(_last_id(client, key) for key in (names.events, names.wake)):
        expires_ms = now_ms + int(lease_ms)
    return {
        "planner": (owner or b"").decode(),
        "planner_left_s": (int(expires_ms or now_ms) - now_ms) / 1_000,
        **{name: (text or b"").decode() for name, text in zip(troubles, said, strict=True)},
    }


def _last_id(client: redis.Redis, stream: str) -> bytes:
    """Id of the last entry of a stream; "0-0" where it has none."""
    with translating():
        last: Any = client.xrevrange(stream, count=1)
    return last[0][0] if last else b"0-0"


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


def _read_ledger(
    client: redis.Redis, names: keys.RunKeys, frontier: Frontier, groups: Mapping[str, _Group]
) -> Counter[str]:
    """Tell the groups of their trajectories; how many ended untrained, by reason."""
    untrained: Counter[str] = Counter()
    for trajectory_id, value in hash_fields(client, names.ledger):
        state, rest = parse_entry(value, frontier)
        key = keys.parse_trajectory_id(trajectory_id)
        if key.group_id in groups:
            groups[key.group_id].note(key, state, rest)
        end = f"{state}:{rest}"
        if state in STATES_WITH_REASON and not end.startswith(_SAYS_NOTHING):
            untrained[_words(end)] += 1
    return untrained


def _words(end: str) -> str:
    """An end in words.

    >>> _words("filtered:all rewards are equal")
    'filtered: all rewards are equal'
    """
    return ": ".join(end.split(":", 1))


def _read_refills(client: redis.Redis, names: keys.RunKeys) -> list[tuple[TrajectoryKey, int]]:
    """(attempt, ms when it was granted), the oldest first."""
    with translating():
        entries: Any = client.zrange(names.refills, 0, -1, withscores=True)
    return [(keys.parse_trajectory_id(name.decode()), int(ms)) for name, ms in entries]


def _open_refills(
    refills: Sequence[tuple[TrajectoryKey, int]], now_ms: int
) -> tuple[OpenRefill, ...]:
    return tuple(
        OpenRefill(
            group_id=key.group_id,
            sample=key.sample,
            attempt=key.attempt,
            since_s=max(0, now_ms - granted_ms) / 1_000,
        )
        for key, granted_ms in refills[:MAX_REFILLS]
    )


def _lease_ends(
    client: redis.Redis, names: keys.RunKeys, groups: Iterable[_Group]
) -> dict[TrajectoryKey, int]:
    """Return the end of the lease of every open trajectory that has one."""
    return _scores(
        client,
        names.leases,
        {key.trajectory_id: key for group in groups for key, _ in group.open},
    )


def _scores(client: redis.Redis, name: str, members: Mapping[str, _Name]) -> dict[_Name, int]:
    """The scores of those members of a sorted set that are there."""
    words = list(members)
    found: dict[_Name, int] = {}
    for start in range(0, len(words), PAGE):
        page = words[start : start + PAGE]
        with translating():
            scores: Any = client.zmscore(name, page)
        found.update({members[w]: int(s) for w, s in zip(page, scores, strict=True) if s})
    return found


def _silent(
    groups: Iterable[_Group], leases: Mapping[TrajectoryKey, int], now_ms: int
) -> tuple[SilentWriter, ...]:
    """Writers that have let all their leases lapse."""
    ends_ms: dict[str, list[int]] = defaultdict(list)
    for group in groups:
        for key, writer in group.open:
            if key in leases:
                ends_ms[writer].append(leases[key])
    silent = [
        SilentWriter(writer=writer, num_open=len(ends), silent_s=(now_ms - max(ends)) / 1_000)
        for writer, ends in ends_ms.items()
        if max(ends) <= now_ms
    ]
    return tuple(sorted(silent, key=lambda each: (-each.num_open, each.writer))[:MAX_SILENT])


def _oldest(
    client: redis.Redis,
    run: str,
    waiting: Mapping[str, _Group],
    leases: Mapping[TrajectoryKey, int],
    now_ms: int,
) -> tuple[WaitingGroup, ...]:
    """The groups that have waited longest; one of which nothing tells is an old one."""
    names = keys.run_keys(run)
    awaited = {key for group in waiting.values() for key in group.awaited}
    opened_ms, sealed_ms = _moments(client, run, waiting, awaited)
    oldest = sorted(waiting, key=lambda name: (opened_ms.get(name, 0), name))[:MAX_GROUPS]
    due = {f"group:{keys.encode_name(name)}": name for name in oldest}
    group_due_ms = _scores(client, names.deadlines, due)
    reward_due_ms = _scores(
        client, names.deadlines, {f"reward:{key.trajectory_id}": key for key in awaited}
    )
    run_now_ms = _run_ms(client, names, now_ms)
    return tuple(
        WaitingGroup(
            group_id=name,
            age_s=_ago_s(opened_ms.get(name), now_ms),
            num_sealed=len(waiting[name].sealed),
            num_needed=waiting[name].num_needed,
            deadline_left_s=_left_s(group_due_ms.get(name), run_now_ms),
            open_members=_open_members(waiting[name], leases, now_ms),
            awaited=tuple(
                AwaitedReward(
                    sample=key.sample,
                    attempt=key.attempt,
                    since_s=_ago_s(sealed_ms.get(key), now_ms),
                    deadline_left_s=_left_s(reward_due_ms.get(key), run_now_ms),
                )
                for key in sorted(waiting[name].awaited)[:MAX_MEMBERS]
            ),
            not_begun=tuple(waiting[name].not_begun[:MAX_MEMBERS]),
        )
        for name in oldest
    )


def _open_members(
    group: _Group, leases: Mapping[TrajectoryKey, int], now_ms: int
) -> tuple[OpenMember, ...]:
    """Those of a group, the longest lapsed first."""
    held = sorted((leases[key], key, writer) for key, writer in group.open if key in leases)
    return tuple(
        OpenMember(
            sample=key.sample,
            attempt=key.attempt,
            writer=writer,
            lease_left_s=(end_ms - now_ms) / 1_000,
        )
        for end_ms, key, writer in held[:MAX_MEMBERS]
    )


def _moments(
    client: redis.Redis,
    run: str,
    groups: Mapping[str, _Group],
    trajectories: set[TrajectoryKey],
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
        elif isinstance(event, SealedTrajectory) and event.key in trajectories:
            sealed_ms.setdefault(event.key, entry_ms(entry_id))
    if opened_ms.keys() < groups.keys():
        born_ms = openings_in_snapshot(client, run)
        known = ((name, born_ms.get(keys.encode_name(name))) for name in groups)
        opened_ms = {name: ms for name, ms in known if ms is not None} | opened_ms
    return opened_ms, sealed_ms


def _run_ms(client: redis.Redis, names: keys.RunKeys, now_ms: int) -> int:
    with translating():
        fields: Any = client.hmget(names.clock, *clock.FIELDS)
    return clock.run_ms(fields, now_ms=now_ms)


def _ago_s(ms: int | None, now_ms: int) -> float | None:
    return None if ms is None else max(0, now_ms - ms) / 1_000


def _left_s(ms: int | None, now_ms: int) -> float | None:
    return None if ms is None else (ms - now_ms) / 1_000
