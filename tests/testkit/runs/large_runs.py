"""A run that is large in every respect, as its records and fields are after weeks of training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import redis

from testkit.plans import manifest, sealed, shape, trajectory_plan
from testkit.runs.folds import opened, snapshot_of
from testkit.worst_calls.store import LimitStore
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.members import FoldState, GroupMembers
from turnstream.batching.merge.plan import GroupPlan, Manifest
from turnstream.records.compact import CompactBatch, encode_batch, encode_ends
from turnstream.records.encoding import MANIFEST, to_message, write_frame
from turnstream.records.events import MAX_TURNS, encode_event
from turnstream.records.snapshots import encode_snapshot
from turnstream.store.client.keys import RUNS, run_keys
from turnstream.store.run.runs import create_run
from turnstream.types import (
    NO_PARENT,
    Event,
    RewardPosted,
    SealedTrajectory,
    TrajectoryKey,
    VersionAnnounced,
)

LARGEST_GROUP: Final = 4_096
"""Samples of each large group: a quarter is sealed, awaited, open, and not started."""

RELEASED: Final = 1_900
PLANNED: Final = 2_000
"""Newest batches. The plans after the released ones are stored."""

NUM_EVENTS: Final = 10_000
"""Events of the run, at least."""

MAX_RUNS: Final = 1_000
"""Runs that `add_runs` writes."""

_LARGE: Final = [f"large-{number}" for number in range(4)]
_ENDED: Final = [f"ended-{number}" for number in range(1_000)]
_WAITING: Final = [f"waiting-{number}" for number in range(1_000)]
_SAMPLES: Final = 8  # of all other groups
_BATCH: Final = 64 * _SAMPLES
_PLAN: Final = [f"task-{number}" for number in range(384)]  # 3,072 trajectories: see worst_calls
_RECORDS: Final = 400
_MANY: Final = 1_000
_REASON: Final = "the mean of the reward is below low=0.2 (0.125) " + "r" * 400
_ENDS: Final = (f"filtered:{_REASON}", "expired:its lease ended", f"abandoned:{_REASON}")
_LATER: Final = 9e12  # ms
_TURNS: Final = (
    shape(1_000, 100),
    *(shape(50, 100, parent=n, shared=1_100 + 150 * n) for n in range(_SAMPLES - 1)),
)


class LargeRun(LimitStore):
    """Writes the run directly, not with scripts: two seconds of CPU time."""

    def write(self) -> None:
        """Write the whole run; the counts of its ledger add up."""
        self.write_ledger()
        self._groups()
        self._events()
        self._past()
        self._plans()
        self._others()

    def write_ledger(self) -> None:
        """Write the ledger, and nothing else."""
        entries = {key.trajectory_id: value for key, value in _entries()}
        self.fill(self.keys.ledger, entries.items())
        self.fill(self.keys.payload_bytes, ((each, "70000") for each in entries))
        open_ids = [each for each, value in entries.items() if value.startswith("open")]
        self.score(self.keys.leases, ((each, _LATER) for each in open_ids))
        counts = Counter(value.partition(":")[0] for value in entries.values())
        counts["planned"] = PLANNED * _BATCH
        counts.update({"filtered": _RECORDS * 250, "expired": _RECORDS * 250})
        self.fill(self.keys.counts, [*counts.items(), ("accepted", counts.total())])

    def _groups(self) -> None:
        self.fill(self.keys.groups, ((each, f"{LARGEST_GROUP}:open") for each in _LARGE))
        self.fill(self.keys.groups, ((each, f"{_SAMPLES}:filtered") for each in _ENDED))
        self.fill(self.keys.groups, ((each, f"{_SAMPLES}:open") for each in _WAITING))
        self.score(self.keys.deadlines, ((f"group:{each}", _LATER) for each in _LARGE))
        self.score(self.keys.refills, ((f"{each}/0/1", 1) for each in _WAITING))

    def _events(self) -> None:
        """The events of the open groups, and a snapshot of the large ones."""
        groups = {
            each: GroupMembers(opened(LARGEST_GROUP, LARGEST_GROUP, group_id=each), "1-0")
            for each in _LARGE
        }
        events: list[Event] = [group.opened for group in groups.values()]
        events += [opened(_SAMPLES, _SAMPLES, group_id=each) for each in _WAITING]
        for key, value in _entries():
            if key.group_id in groups and not value.startswith("open"):
                event = _sealed(key, awaits_reward=value.startswith("awaiting"))
                groups[key.group_id].members[key.sample] = event
                events += [event, RewardPosted(key=key, reward=None, reward_components={"a": 0.5})]
        assert len(events) >= NUM_EVENTS
        self.add(self.keys.events, events)
        record = encode_snapshot(snapshot_of(FoldState(groups=groups)))
        self.fill(self.keys.snapshot, [("record", record), ("step", PLANNED)])

    def add(self, stream: str, events: list[Event]) -> None:
        """Write events to a stream, with the trajectories that they were posted for."""
        pipeline = self.client.pipeline(transaction=False)
        for each in events:
            key = getattr(each, "key", None)
            posted_for = {} if key is None else {"t": key.trajectory_id}
            pipeline.xadd(stream, {"r": encode_event(each), **posted_for})
        pipeline.execute()

    def _past(self) -> None:
        """Compact records of the released batches, and of trajectories that ended untrained."""
        batches = (
            CompactBatch(
                step=step,
                manifest_hash="f" * 64,
                lineage="main",
                trajectories=_keys(f"task-{step}-", _BATCH),
                crcs=tuple(range(2**31, 2**31 + _BATCH)),
                mean_reward=0.5,
            )
            for step in range(1, RELEASED + 1)
        )
        self.fill(
            self.keys.finished_batches, ((str(each.step), encode_batch(each)) for each in batches)
        )
        for number in range(_RECORDS):
            ends = {key: _ENDS[key.sample % 2] for key in _keys(f"end-{number}-", 500)}
            self.fill(self.keys.untrained, [(str(number), encode_ends(ends))])
        reasons = (f"{end} {number}" for number in range(250) for end in _ENDS[:2])
        self.fill(self.keys.reasons, ((each, _RECORDS) for each in reasons))

    def _plans(self) -> None:
        """The plans of the batches that are not released, and the progress of the trainer."""
        message = to_message(_large_manifest(self.run))
        for step in range(RELEASED + 1, PLANNED + 1):
            message.step = step
            record = write_frame(MANIFEST, message.SerializeToString(deterministic=True))
            self.client.xadd(self.keys.plan, {"r": record}, id=f"{step}-0")
        steps = range(RELEASED, PLANNED + 1)
        self.fill(self.keys.batches, ((str(n), f"{n * _BATCH}:{'f' * 64}") for n in steps))
        times = (f"{name}:{step}" for name in ("planned", "stepped") for step in steps)
        self.fill(self.keys.times, ((each, 1_700_000_000_000) for each in times))
        frontier = {"planned": PLANNED, "stepped": PLANNED - 1, "committed": PLANNED - 50}
        frontier |= {"released": RELEASED, "folded": RELEASED, "planned_groups": len(_PLAN)}
        frontier |= {"opened_groups": 130_000, "live_groups": 2_000, "open_groups": 1_004}
        rolled_back = " ".join(f"r{n}:{n}:{n + 1}" for n in range(1, 17))
        session = {"session": "s", "session_epoch": 1, "dp_world_size": 512}
        self.fill(self.keys.frontier, {**frontier, **session, "rollbacks": rolled_back}.items())

    def _others(self) -> None:
        """Dead letters, versions, observers and prompts."""
        letters = (f"dead-{number}/0/0" for number in range(_MANY))
        self.fill(self.keys.dead_letters, ((each, "1700000000000:70000") for each in letters))
        pipeline = self.client.pipeline(transaction=False)
        for number in range(1, _MANY + 1):
            damaged: Any = {"r": b"r" * 4_096, "why": "w" * 500}
            pipeline.xadd(self.keys.damaged, damaged, id=f"{number}-0")
            version = VersionAnnounced(
                version=number, step=number, lineage="main", weights_uri="file:///" + "w" * 4_000
            )
            pipeline.xadd(self.keys.versions, {"r": encode_event(version)}, id=f"{number + 1}-0")
        pipeline.execute()
        observers = (f"observer-{number}" for number in range(512))
        self.fill(self.keys.observers, ((e, f"5:{_LATER:.0f}:60000@owner") for e in observers))
        self.fill(self.keys.prompts, [("added", 20_000), ("next", 12_000), ("done", 10_000)])
        self.score(self.keys.retry, ((str(number), number) for number in range(2_000)))


def add_runs(client: redis.Redis) -> None:
    """Write many runs: copies of a new one."""
    names = [f"many-{number}" for number in range(MAX_RUNS)]
    create_run(client, names[0], BatchingConfig(batch_groups=1, mini_batch_groups=1))
    first, *others = map(run_keys, names)
    pipeline = client.pipeline(transaction=False)
    pipeline.sadd(RUNS, *names)
    for each in others:
        pipeline.copy(first.frontier, each.frontier)
        pipeline.copy(first.config, each.config)
        pipeline.copy(first.counts, each.counts)
    pipeline.execute()


def longest_seal() -> SealedTrajectory:
    """Return a seal of as many turns as a trajectory may have, with values of many digits."""
    event = _sealed(TrajectoryKey("long", 0), awaits_reward=False)
    turns = (shape(500_000, 900_000, parent=NO_PARENT),) * MAX_TURNS
    crcs = (2**32 - 1,) * MAX_TURNS
    return replace(event, turns=turns, turn_rewards=(0.123456,) * MAX_TURNS, payload_crcs=crcs)


def _entries() -> Iterator[tuple[TrajectoryKey, str]]:
    """Yield the entries of the ledger: 21,000 trajectories that are not planned."""
    begun = ("sealed:1", "awaiting_reward:1", "open:1:generator-7")
    for name in _LARGE:
        for sample in range(LARGEST_GROUP * 3 // 4):
            yield TrajectoryKey(name, sample), begun[sample % 3]
    for number, name in enumerate(_ENDED):
        for sample in range(_SAMPLES):
            yield TrajectoryKey(name, sample), _ENDS[number % 3]
    for number in range(_MANY):
        yield TrajectoryKey(f"dead-{number}", 0), f"dead:{_REASON}"


def _keys(prefix: str, count: int) -> tuple[TrajectoryKey, ...]:
    return tuple(TrajectoryKey(f"{prefix}{n // _SAMPLES}", n % _SAMPLES) for n in range(count))


def _sealed(key: TrajectoryKey, *, awaits_reward: bool) -> SealedTrajectory:
    event = sealed(
        key.group_id,
        sample=key.sample,
        reward=None if awaits_reward else 1.0,
        turns=_TURNS,
        version=999,
        tags={f"tag-{n}": "value" for n in range(4)},
        metrics={f"metric-{n}": 0.5 for n in range(4)},
    )
    return replace(event, awaits_reward=awaits_reward)


def _large_manifest(run: str) -> Manifest:
    """Return a plan of trajectories of 8 turns each, in one mini-batch."""
    base = manifest(run=run, step=PLANNED)
    (row,) = trajectory_plan().sequences
    row = row._replace(
        turns=tuple(range(8)), prompt_length=1_000, num_tokens=2_150, num_trained_tokens=800
    )
    member = replace(
        trajectory_plan(),
        sequences=(row,),
        payload_crcs=tuple(range(2**31, 2**31 + 8)),
        turn_advantages=(0.5,) * 8,
    )
    groups = tuple(
        GroupPlan(
            group_id=name,
            prompt_uid=f"uid of {name}",
            trajectories=tuple(
                replace(member, key=TrajectoryKey(name, sample)) for sample in range(_SAMPLES)
            ),
        )
        for name in _PLAN
    )
    num_rows = len(groups) * _SAMPLES
    cut = replace(base.mini_batches[0], num_groups=len(groups), num_rows=num_rows, width=2_150)
    return replace(base, groups=groups, mini_batches=(cut,))
