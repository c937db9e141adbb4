"""What a finished trajectory costs in the store: commits and compacts millions of them, and weighs.

Everything that a leader does to a released batch is done by the real scripts; what comes before it
(opening, sealing) is written as it would stand there. Payload is not part of it: it is gone.

    python benchmarks/ledger.py --trajectories 10000000
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import redis

from turnstream.batching.config import BatchingConfig
from turnstream.records.compact import CompactBatch, encode_batch
from turnstream.store import keys
from turnstream.store.connection import Link, connect
from turnstream.store.runs import create_run
from turnstream.store.scripts import Command, Script, pack
from turnstream.types import TrajectoryKey
from turnstream_server.bus.release import FOLD_SLICE, GROUP_SLICE
from turnstream_server.embedded import EmbeddedServer

RUN = "ledger"
BATCH_TRAJECTORIES = 2_048
LIMIT_BYTES = 16


class Weight(NamedTuple):
    """What a run of finished trajectories weighs, in bytes per trajectory.

    Attributes:
        used_memory: by the growth of the whole server.
        memory_usage: by MEMORY USAGE of the run's keys, whole.
    """

    group_size: int
    trajectories: int
    used_memory: float
    memory_usage: float
    seconds: float
    mean_call_ms: float


class Planned(NamedTuple):
    """A batch as a planner would have left it."""

    step: int
    manifest_hash: str
    groups: list[str]
    members: list[TrajectoryKey]

    @property
    def ids(self) -> list[str]:
        """The names of its trajectories in the ledger."""
        return [f"{key.group_id}/{key.sample}/0" for key in self.members]


class Store:
    """Commands sent many at a time; any refusal ends the benchmark."""

    def __init__(self, url: str) -> None:
        self._link = Link(url)

    def run(self, *commands: Command | tuple[Any, ...]) -> list[Any]:
        """Send commands in one round trip, and give their replies."""
        words = [each.words if isinstance(each, Command) else each for each in commands]
        replies = self._link.exchange(pack(words), len(words))
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies


class Life:
    """The life of a run, batch by batch."""

    def __init__(self, client: redis.Redis, store: Store) -> None:
        self._store = store
        self._names = keys.run_keys(RUN)
        server = ("acquire_leader", "start_session", "write_manifest", "stepped", "committed")
        release = ("raise_floor", "save_snapshot", "give_back", "fold_batch", "finish_batch")
        self._scripts = {
            name: Script(name, "turnstream_server.bus") for name in (*server, *release)
        }
        for script in self._scripts.values():
            client.script_load(script.source)
        names = self._names
        store.run(self._call("acquire_leader", (names.frontier, names.leader), "bench", 10**9))
        start = (names.frontier, names.batches, names.wake, names.sessions)
        start += (names.events, names.versions, names.ranks)
        store.run(self._call("start_session", start, "s", 1, "", ""))
        self._hash_before = ""
        self._kept: list[Planned] = []

    def live(self, batch: Planned) -> None:
        """Plan, train and commit a batch; release what falls behind."""
        names, step = self._names, batch.step
        ids = batch.ids
        values = [word for each in ids for word in (each, "sealed:1")]
        groups = [word for each in batch.groups for word in (each, "8:open")]
        plan = (
            *(names.leader, names.frontier, names.batches, names.plan),
            *(names.ledger, names.counts, names.groups, names.members),
            *(names.deadlines, names.refills, names.leases, names.wake),
            *(names.tasks, names.prompts, names.config, names.held, names.budget),
            names.times,
        )
        stepped = (names.frontier, names.batches, names.wake, names.ranks, names.times)
        committed = (names.frontier, names.batches, names.times)
        self._store.run(
            ("HSET", names.ledger, *values),
            ("HSET", names.held, *[word for each in ids for word in (each, "9000")]),
            ("HINCRBY", names.budget, "stored", 9000 * len(ids)),
            ("HSET", names.groups, *groups),
            ("HINCRBY", names.counts, "accepted", len(ids)),
            ("HINCRBY", names.counts, "sealed", len(ids)),
            self._call(
                "write_manifest",
                plan,
                *(1, step, batch.manifest_hash, self._hash_before, "m", 1, "main"),
                *ids,
            ),
            self._call("stepped", stepped, 1, step, batch.manifest_hash),
            self._call("committed", committed, 1, step, batch.manifest_hash),
            self._call(
                "raise_floor", (names.leader, names.frontier, names.config, names.observers), 1, ""
            ),
            self._call("save_snapshot", (names.leader, names.snapshot), 1, f"{step}-0", step, "s"),
        )
        self._hash_before = batch.manifest_hash
        self._kept.append(batch)
        if len(self._kept) > 1:  # two checkpoints are kept
            self._fold(self._kept.pop(0))

    def _fold(self, batch: Planned) -> None:
        names = self._names
        where = names.of_fold_batch
        finish = (
            *(names.leader, names.frontier, names.batches),
            *(names.plan, names.past, names.snapshot, names.times),
        )
        record = encode_batch(
            CompactBatch(
                step=batch.step,
                manifest_hash=batch.manifest_hash,
                lineage="main",
                trajectories=tuple(batch.members),
                crcs=tuple(_crcs(batch)),
            )
        )
        ids = batch.ids
        given_back = (names.ledger, names.held, names.budget, names.wake)
        self._store.run(
            *(self._call("give_back", given_back, *some) for some in _sliced(ids, FOLD_SLICE)),
            *(
                self._call("fold_batch", where, 1, batch.step, 0, *some)
                for some in _sliced(ids, FOLD_SLICE)
            ),
            *(
                self._call("fold_batch", where, 1, batch.step, len(some), *some)
                for some in _sliced(batch.groups, GROUP_SLICE)
            ),
            self._call("finish_batch", finish, 1, batch.step, record),
        )

    def _call(self, name: str, where: tuple[str, ...], *args: Any) -> Command:
        return self._scripts[name](where, *args)


def weigh(*, group_size: int, trajectories: int) -> Weight:
    """Live through a run of so many trajectories, in a server of its own."""
    with EmbeddedServer() as server, connect(server.url) as client:
        num_groups = BATCH_TRAJECTORIES // group_size
        create_run(
            client, RUN, BatchingConfig(batch_groups=num_groups, mini_batch_groups=num_groups)
        )
        life = Life(client, Store(server.url))
        client.config_resetstat()
        empty = _used_memory(client)
        started_s = time.monotonic()
        for step in range(1, trajectories // BATCH_TRAJECTORIES + 1):
            life.live(_planned(step, num_groups=num_groups, group_size=group_size))
        seconds = time.monotonic() - started_s
        finished = trajectories // BATCH_TRAJECTORIES * BATCH_TRAJECTORIES
        usage = [client.memory_usage(key, samples=0) or 0 for key in keys.run_keys(RUN)]
        return Weight(
            group_size=group_size,
            trajectories=finished,
            used_memory=(_used_memory(client) - empty) / finished,
            memory_usage=sum(usage) / finished,
            seconds=seconds,
            mean_call_ms=_mean_call_ms(client),
        )


def _planned(step: int, *, num_groups: int, group_size: int) -> Planned:
    first = (step - 1) * num_groups
    # Groups are complete in another order than they were opened in: 7 and the size share no factor.
    groups = [f"visit-{first + 7 * index % num_groups}" for index in range(num_groups)]
    return Planned(
        step,
        hashlib.sha256(b"%d" % step).hexdigest(),
        groups,
        [TrajectoryKey(group, sample) for group in groups for sample in range(group_size)],
    )


def _crcs(batch: Planned) -> Iterator[int]:
    """Numbers without a pattern, as checksums are."""
    digest = hashlib.shake_128(b"%d" % batch.step).digest(4 * len(batch.members))
    for start in range(0, len(digest), 4):
        yield int.from_bytes(digest[start : start + 4], "little")


def _sliced(values: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _used_memory(client: redis.Redis) -> int:
    facts: Any = client.info("memory")
    return int(facts["used_memory"])


def _mean_call_ms(client: redis.Redis) -> float:
    """The mean time of a script call, in the server."""
    facts: Any = client.info("commandstats")
    return float(facts["cmdstat_evalsha"]["usec_per_call"]) / 1_000


def main() -> None:
    """Weigh groups of 1 and of 8, and print the result; fails above 16 bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=10_000_000)
    parser.add_argument("--group-size", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("group of   trajectories   used_memory   MEMORY USAGE   seconds   ms a call", flush=True)
    weights: list[Weight] = []
    for size in options.group_size:
        weight = weigh(group_size=size, trajectories=options.trajectories)
        weights.append(weight)
        sizes = f"{weight.used_memory:9.2f} B   {weight.memory_usage:10.2f} B"
        times = f"{weight.seconds:7.0f}   {weight.mean_call_ms:9.3f}"
        print(f"{size:8}   {weight.trajectories:12,}   {sizes}   {times}", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([weight._asdict() for weight in weights], indent=2))
    if any(max(weight.used_memory, weight.memory_usage) > LIMIT_BYTES for weight in weights):
        raise SystemExit(f"more than {LIMIT_BYTES} bytes per finished trajectory")


if __name__ == "__main__":
    main()
