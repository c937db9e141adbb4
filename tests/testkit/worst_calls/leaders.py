"""The most expensive calls of the leader of a run."""

from __future__ import annotations

from typing import Any, Final, cast

from testkit.plans import manifest
from testkit.worst_calls.generators import BUCKET, GROUP, opened
from testkit.worst_calls.services import SESSION_BUILDS
from testkit.worst_calls.store import (
    NAME,
    REASON,
    Build,
    LimitStore,
    groups_of,
    ids_of,
    worst,
)
from turnstream.batching.config.values import LARGEST_GROUP
from turnstream.batching.fold.decisions import GroupCut, GroupEvaluated
from turnstream.records.events import MAX_EVENT_BYTES
from turnstream.store.client import keys
from turnstream.store.client.scripts import Command
from turnstream.store.client.stored_values import StoredHash
from turnstream.store.run import clock
from turnstream_server.batcher.planner.replanning import (
    MAX_WITHDRAWN,
    Withdrawal,
    WithdrawalFacts,
    withdraw,
)
from turnstream_server.ledger.core.scan import PAGE_BYTES, PAGE_EVENTS
from turnstream_server.ledger.leadership.leader_fields import TRIM_SLICE, ParkFacts, park, trim
from turnstream_server.ledger.leadership.writes import (
    Changes,
    Position,
    RunClient,
    Term,
    write_command,
)
from turnstream_server.ledger.planning.deadlines import DEADLINES_PER_CALL, fire_orphaned, limit
from turnstream_server.ledger.planning.plan_writes import GROUP_WEIGHT, StepFacts, commit, mark
from turnstream_server.ledger.planning.plan_writes import SLICE as PLAN_SLICE
from turnstream_server.ledger.planning.settling import SLICE as END_SLICE
from turnstream_server.ledger.planning.settling import (
    Attempt,
    GroupState,
    settle,
    settle_evaluation,
)
from turnstream_server.ledger.planning.trajectories import (
    MAX_KEPT_EVENTS,
    REJECT_SLICE,
    Rejection,
    RejectionFacts,
    reject,
)
from turnstream_server.ledger.release.release import COMPACT_SLICE, GROUP_SLICE
from turnstream_server.ledger.release.release_writes import (
    EndedFacts,
    Part,
    WatermarkFacts,
    advance,
    compact,
    finish,
    release_bytes,
    replace_ended,
)
from turnstream_server.ledger.sessions.observers import MOST_OBSERVERS, expire

WORST: Final[dict[str, Build]] = {}

CONSTANT: Final = {
    "acquire_leader": "single fields",
    "release_payload": "two keys, which the server frees in another thread",
    "request_replan": "one field",
}

OBSERVERS: Final = 256
"""Observers of one run, at most."""


def rejected(store: LimitStore) -> Changes | None:
    """The most events of one call, half of them of trajectories, and as many kept as there may."""
    for number in range(1, MAX_KEPT_EVENTS + 1):
        store.client.xadd(store.keys.damaged, {"r": b"r" * 100}, id=f"{number}-0")
    ids = ids_of(REJECT_SLICE)
    opened(store, ids)
    store.fill(store.keys.ledger, ((each, "sealed:1") for each in ids))
    events = [
        RejectionFacts(
            Rejection(f"{2_000 + i}-0", REASON, keys.parse_trajectory_id(each) if i % 2 else None),
            Attempt(each, b"sealed:1", b"70000") if i % 2 else None,
            {b"r": b"r" * MAX_EVENT_BYTES},
        )
        for i, each in enumerate(ids)
    ]
    return reject(events, newest=(f"{MAX_KEPT_EVENTS}-0", "0-0"), now_ms=1)


def sealed_group(store: LimitStore, group: str, num_samples: int) -> GroupState:
    """Write a group of a prompt, all of it sealed; return its facts."""
    ids = ids_of(num_samples, group=group)
    store.fill(store.keys.groups, [(group, f"{num_samples}:open")])
    store.fill(store.keys.ledger, ((each, "sealed:1") for each in ids))
    store.fill(store.keys.payload_bytes, ((each, "70000") for each in ids))
    store.fill(store.keys.tasks, [(group, group)])
    store.score(store.keys.deadlines, [(f"group:{group}", 1)])
    attempts = [Attempt(each, b"sealed:1", b"70000") for each in ids]
    return GroupState(group, b"%d:open" % num_samples, None, group.encode(), attempts)


def open_group(store: LimitStore, group: str, *, state: str, num_open: int) -> GroupState:
    """Write a group of the largest size, of which some samples are open; return its facts."""
    ids = ids_of(LARGEST_GROUP, group=group)
    opened(store, ids[:num_open])
    store.fill(store.keys.groups, [(group, f"{LARGEST_GROUP}:{state}")])
    store.client.hdel(store.keys.payload_bytes, *ids)
    entries = store.client.hmget(store.keys.ledger, ids)
    attempts = [Attempt(*each, None) for each in zip(ids, cast(Any, entries), strict=True)]
    return GroupState(group, b"%d:%s" % (LARGEST_GROUP, state.encode()), None, None, attempts)


def term_of(store: LimitStore) -> Term:
    """The term of the leader of a run, without a client."""
    return Term(cast(Any, None), store.run, 1)


def watermark(store: LimitStore) -> Changes | None:
    """As many checkpoints as a long run keeps, and many observers."""
    checkpoints = ",".join(map(str, range(1, 20_001))).encode()
    observers = {
        each.encode(): b"%d:9:9" % (20_000 - i) for i, each in enumerate(groups_of(MOST_OBSERVERS))
    }
    store.fill(store.keys.frontier, [("checkpoints", checkpoints)])
    store.fill(store.keys.observers, ((each.decode(), seen) for each, seen in observers.items()))
    facts = WatermarkFacts(
        released=None, checkpoints=checkpoints, revision=1, num_kept=15_000, observers=observers
    )
    return advance(facts, at_most=None)[1]


def parked(store: LimitStore) -> Changes | None:
    """Observers that have all expired."""
    observers = {each.encode(): b"1:0:9" for each in groups_of(MOST_OBSERVERS)}
    store.fill(store.keys.observers, ((each.decode(), seen) for each, seen in observers.items()))
    fields: Any = store.client.hmget(store.keys.clock, clock.FIELDS)
    return park(ParkFacts(fields, observers, now_ms=1), Position("1-1", "1-1"))


def expired(store: LimitStore) -> Changes | None:
    """Observers that all expire."""
    observers = {each.encode(): b"1:5:9" for each in groups_of(MOST_OBSERVERS)}
    store.fill(store.keys.observers, ((each.decode(), seen) for each, seen in observers.items()))
    return expire(observers, run_ms=10**6, most_kept=0).changes


def trimmed(store: LimitStore) -> Changes:
    """The most events of one call."""
    for number in range(1, 4 * TRIM_SLICE):
        store.client.xadd(store.keys.events, {"r": b"r" * 2_000, "t": NAME}, id=f"{number}-0")
    ids = [f"{number}-0" for number in range(TRIM_SLICE)]
    store.score(store.keys.rejected, ((each, number) for number, each in enumerate(ids)))
    return trim(f"{2 * TRIM_SLICE}-0", [each.encode() for each in ids])


def limited(store: LimitStore) -> Changes:
    """The most deadlines of one call that are too late."""
    late = [f"reward:{each}" for each in ids_of(DEADLINES_PER_CALL)]
    store.score(store.keys.deadlines, ((each, 9e15) for each in late))
    return limit([each.encode() for each in late], latest_ms=9, revision=1)


def bytes_released(store: LimitStore) -> Changes | None:
    """The most trajectories of one call."""
    ids = ids_of(COMPACT_SLICE)
    store.fill(store.keys.payload_bytes, ((each, "70000") for each in ids))
    store.fill(store.keys.budget, [("stored", 10**9)])
    return release_bytes([Attempt(each, b"expired:why", b"70000") for each in ids])


def folded(store: LimitStore, names: list[str], *, are_groups: bool) -> Changes | None:
    """Names of a released step; `over` is as long as it gets."""
    entry = b"1:planned" if are_groups else b"planned:1"
    store.fill(store.keys.finished_groups, ((f"{number:03x}", BUCKET) for number in range(4096)))
    store.fill(store.keys.groups if are_groups else store.keys.ledger, ((n, entry) for n in names))
    store.fill(store.keys.frontier, [("released", 1)])
    return compact(Part(1, names, are_groups), [entry] * len(names), released=b"1")


def folded_groups(store: LimitStore) -> Changes | None:
    """The most groups of one call."""
    return folded(store, groups_of(GROUP_SLICE), are_groups=True)


def folded_trajectories(store: LimitStore) -> Changes | None:
    """The most trajectories of one call."""
    return folded(store, ids_of(COMPACT_SLICE), are_groups=False)


def ended(store: LimitStore) -> Changes | None:
    """The most trajectories of one record, each with a reason and a group of its own."""
    groups = groups_of(COMPACT_SLICE)
    entries = {f"{each}/0/0": f"expired:{each}".encode() for each in groups}
    store.fill(store.keys.finished_groups, ((f"{number:03x}", BUCKET) for number in range(4096)))
    store.fill(store.keys.groups, ((each, "1:expired") for each in groups))
    store.fill(store.keys.ledger, entries.items())
    store.fill(store.keys.reasons, ((f"{n}{REASON}", 1) for n in range(700)))
    facts = EndedFacts(
        newest=None,
        entries=entries,
        groups=dict.fromkeys(groups, b"1:expired"),
        reasons=(),
        num_reasons=700,
    )
    return replace_ended(facts, number=1, record=b"r" * 100_000)


def finished(store: LimitStore) -> Changes:
    """The plan of a large batch, after one that was withdrawn."""
    store.fill(store.keys.frontier, [("released", 1)])
    store.fill(store.keys.snapshot, [("step", 1)])
    for revision in range(2):
        store.client.xadd(store.keys.plan, {"r": b"m" * 4_000_000}, id=f"1-{revision}")
    facts = (b"1", None, b"1")
    return finish(facts, {1: b"r" * 1_000_000})[0]


def withdrawn(store: LimitStore) -> Changes | None:
    """The largest plans that are withdrawn, a tenth of which is dead, and many observers."""
    ids = [ids_of(2, group=f"{number}") for number in range(MAX_WITHDRAWN // 2)]
    attempts = [[Attempt(each, b"planned:2", b"70000") for each in own] for own in ids]
    groups = [
        GroupState(f"{number}", b"2:planned", None, None, own)
        for number, own in enumerate(attempts)
    ]
    store.fill(store.keys.groups, ((each.name, "2:planned") for each in groups))
    store.fill(store.keys.ledger, ((each, "planned:2") for own in ids for each in own))
    store.fill(store.keys.frontier, [("planned", 2), ("session_epoch", 1), ("replan", "q")])
    observers = {each.encode(): b"2:9:9" for each in groups_of(OBSERVERS)}
    store.fill(store.keys.observers, ((each.decode(), seen) for each, seen in observers.items()))
    for step in (1, 2):
        store.client.xadd(store.keys.plan, {"r": b"m" * 1_000_000}, id=f"{step}-0")
    fields = cast(Any, store.client.hgetall(store.keys.frontier))
    facts = WithdrawalFacts(
        StoredHash(store.keys.frontier, fields), {b"newest": b"1"}, observers, None, groups, 1
    )
    named = [keys.parse_trajectory_id(each) for own in ids for each in own]
    dead = dict.fromkeys(named[::10], REASON)
    epochs = dict.fromkeys((each for each in named if each not in dead), 1)
    return withdraw(
        facts, Withdrawal("q", [manifest(step=2)], dead, epochs, "1-1", b"s" * 1_000_000)
    )


BUILDS: Final = (
    *(watermark, folded_groups, folded_trajectories, ended, finished),
    *(parked, expired, trimmed, limited, rejected, withdrawn, bytes_released),
)


@worst(WORST)
def leader_write(store: LimitStore) -> list[Command]:
    """Slices of plans, the ends of large groups, the release and sessions at their limits."""
    term = term_of(store)
    small = [sealed_group(store, each, 1) for each in groups_of(PLAN_SLICE // (1 + GROUP_WEIGHT))]
    facts = StepFacts(
        frontier=StoredHash(store.keys.frontier, {b"lineage": b"main"}),
        before=None,
        of_step=None,
        revision=1,
        now_ms=1,
    )
    cut = GroupCut(group_id="cut", reason=REASON)
    evaluation = GroupEvaluated(group_id="eval", keys=(), result=None, total=None)
    part = open_group(store, "part", state="open", num_open=LARGEST_GROUP)
    last = open_group(store, "last", state="open", num_open=END_SLICE)
    store.client.hset(store.keys.frontier, "closed", 1)
    evaluated = open_group(store, "eval", state="evaluating", num_open=END_SLICE)
    changes = [
        commit(facts, manifest(), small, manifest_hash="f" * 64, record=b"m" * 1_000_000),
        mark([sealed_group(store, GROUP, LARGEST_GROUP)], step=2),
        settle(part, cut, limits_open=True),
        settle(last, cut, limits_open=True),
        settle_evaluation(evaluated, evaluation, versions=()),
        fire_orphaned(open_group(store, "orphaned", state="open", num_open=0)),
    ]
    written = [write_command(term, each) for each in changes if each is not None]
    for build in BUILDS:
        own = LimitStore(store.client, f"{store.run.name}-{build.__name__}")
        changes = build(own)
        assert changes is not None
        written.append(write_command(term_of(own), changes))
    for build in SESSION_BUILDS:
        own = LimitStore(store.client, f"{store.run.name}-{build.__name__}")
        caller = RunClient(cast(Any, None), own.run)
        written += [write_command(caller, each) for each in build(own)]
    return written


@worst(WORST)
def read_events(store: LimitStore) -> list[Command]:
    """A page of short events, and one that begins with the largest one."""
    for _ in range(2 * PAGE_EVENTS):
        store.client.xadd(store.keys.events, {"r": b"r" * 100, "t": NAME})
    limits = (PAGE_EVENTS, PAGE_BYTES, MAX_EVENT_BYTES)
    largest = store.configured()
    largest.client.xadd(largest.keys.events, {"r": b"r" * MAX_EVENT_BYTES})
    return [
        store.call("read_events", "0-0", *limits),
        largest.call("read_events", "0-0", *limits),
    ]
