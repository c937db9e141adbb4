"""The bytes of a finished trajectory in the store, from millions that are committed and compacted.

The real scripts release batches and untrained trajectories, as a leader does. The results of
earlier calls (open, seal, abandon) are written directly. Payload is not included: it is already
deleted.

    python benchmarks/ledger.py --trajectories 10000000
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import redis
from ends import ends_of
from finished_runs import RUN, Planned, RunWriter, Store

from turnstream.batching.config import BatchingConfig
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream.types import TrajectoryKey
from turnstream_server.embedded import EmbeddedServer

BATCH_TRAJECTORIES = 2_048
WARM_UP = 8
"""Steps before the first measurement. By then the store has everything that does not grow with the
run (two kept batches, counts of a thousand reasons)."""
UNTRAINED_SHARE = 0.3
OPEN_GROUPS = 256
"""Groups that are open at the same time."""
LIMITS_BYTES = {1: 64, 8: 16}
"""Limit of the bytes of a finished trajectory, by the size of its group."""


class Weight(NamedTuple):
    """Size of a run of finished trajectories, in bytes per trajectory.

    Attributes:
        end: "committed" or "untrained".
        used_memory: by the growth of the whole server, of both kinds together.
        memory_usage: MEMORY USAGE of all keys of the run. The fingerprints of groups belong to
            both kinds, and are divided by the groups of each.
        seconds: for both kinds.
    """

    end: str
    group_size: int
    trajectories: int
    used_memory: float
    memory_usage: float
    seconds: float
    mean_call_ms: float


class Meter:
    """Measures the growth of the store from now on."""

    def __init__(self, client: redis.Redis, *, untrained: float) -> None:
        self._client = client
        self._untrained = untrained
        self._used = _used_memory(client)
        self._usage = _memory_usage(client, untrained=untrained)

    def used_memory(self) -> int:
        """Return the growth of the server's memory."""
        return _used_memory(self._client) - self._used

    def memory_usage(self, end: str) -> float:
        """Return the growth of the run's keys for trajectories with this end."""
        return _memory_usage(self._client, untrained=self._untrained)[end] - self._usage[end]


class Sizes(NamedTuple):
    """Sizes of one step: trained groups, dropped groups, trajectories of each."""

    trained: int
    dropped: int
    group_size: int

    @property
    def untrained(self) -> float:
        """Return the share of dropped groups."""
        return self.dropped / (self.trained + self.dropped)

    @property
    def finished(self) -> dict[str, int]:
        """Return the number of trajectories with each end."""
        numbers = {"committed": self.trained, "untrained": self.dropped}
        return {end: number * self.group_size for end, number in numbers.items()}


def measure(
    *, group_size: int, trajectories: int, untrained: float = UNTRAINED_SHARE
) -> list[Weight]:
    """Write a run of so many trajectories to a new server, and measure its growth.

    Args:
        group_size: trajectories of each group.
        trajectories: number of both kinds.
        untrained: the share of those that end without being trained, above 0 and below 1.
    """
    trained = BATCH_TRAJECTORIES // group_size
    sizes = Sizes(trained, round(trained * untrained / (1 - untrained)), group_size)
    num_steps = trajectories // sum(sizes.finished.values())
    with EmbeddedServer() as server, connect(server.url) as client:
        create_run(client, RUN, BatchingConfig(batch_groups=trained, mini_batch_groups=trained))
        writer = RunWriter(client, Store(server.url))
        client.config_set("appendonly", "no")  # only memory is measured
        client.config_resetstat()
        started_s = time.monotonic()
        for step in range(1, WARM_UP + 1):
            _write_step(writer, step, sizes)
        meter = Meter(client, untrained=sizes.untrained)
        for step in range(WARM_UP + 1, WARM_UP + num_steps + 1):
            _write_step(writer, step, sizes)
        seconds = time.monotonic() - started_s
        return [
            Weight(
                end=end,
                group_size=group_size,
                trajectories=num_steps * number,
                used_memory=meter.used_memory() / (num_steps * sum(sizes.finished.values())),
                memory_usage=meter.memory_usage(end) / (num_steps * number),
                seconds=seconds,
                mean_call_ms=_mean_call_ms(client),
            )
            for end, number in sizes.finished.items()
        ]


def _write_step(writer: RunWriter, step: int, sizes: Sizes) -> None:
    trained, dropped = _group_names(step, sizes)
    writer.commit(_planned(step, trained, group_size=sizes.group_size))
    writer.drop(ends_of(step, dropped, group_size=sizes.group_size))


def _memory_usage(client: redis.Redis, *, untrained: float) -> dict[str, float]:
    """Return MEMORY USAGE of the run's keys by the end that they record."""
    names = keys.run_keys(RUN)
    usage = {key: client.memory_usage(key, samples=0) or 0 for key in names}
    of_ends = sum(usage[key] for key in (names.untrained, names.reasons))
    of_ends += untrained * usage[names.finished_groups]
    return {"committed": sum(usage.values()) - of_ends, "untrained": of_ends}


def _group_names(step: int, sizes: Sizes) -> tuple[list[str], list[str]]:
    """Return the names of a step's groups, numbered: the trained ones, and the others."""
    size = sizes.trained + sizes.dropped
    numbers = range((step - 1) * size, step * size)
    rng = random.Random(step)
    dropped = set(rng.sample(numbers, sizes.dropped))
    # Groups are complete in another order than they were opened in.
    trained = sorted(set(numbers) - dropped, key=lambda each: each + rng.random() * OPEN_GROUPS)
    return [f"visit-{each}" for each in trained], [f"visit-{each}" for each in sorted(dropped)]


def _planned(step: int, groups: list[str], *, group_size: int) -> Planned:
    return Planned(
        step,
        hashlib.sha256(b"%d" % step).hexdigest(),
        groups,
        [TrajectoryKey(group, sample) for group in groups for sample in range(group_size)],
    )


def _used_memory(client: redis.Redis) -> int:
    facts: Any = client.info("memory")
    return int(facts["used_memory"])


def _mean_call_ms(client: redis.Redis) -> float:
    """Return the mean time of a script call in the server."""
    facts: Any = client.info("commandstats")
    return float(facts["cmdstat_evalsha"]["usec_per_call"]) / 1_000


def main() -> None:
    """Measure groups of 1 and of 8, and print the result; fail above their limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=10_000_000)
    parser.add_argument("--untrained", type=float, default=UNTRAINED_SHARE)
    parser.add_argument("--group-size", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(
        "group of   end         trajectories   used_memory   MEMORY USAGE   seconds   ms a call",
        flush=True,
    )
    weights: list[Weight] = []
    for size in options.group_size:
        some = measure(
            group_size=size, trajectories=options.trajectories, untrained=options.untrained
        )
        weights += some
        for weight in some:
            sizes = f"{weight.used_memory:9.2f} B   {weight.memory_usage:10.2f} B"
            times = f"{weight.seconds:7.0f}   {weight.mean_call_ms:9.3f}"
            what = f"{size:8}   {weight.end}   {weight.trajectories:12,}"
            print(f"{what}   {sizes}   {times}", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([weight._asdict() for weight in weights], indent=2))
    for weight in weights:
        limit = LIMITS_BYTES.get(weight.group_size)
        if limit and max(weight.used_memory, weight.memory_usage) > limit:
            raise SystemExit(f"groups of {weight.group_size}: more than {limit} bytes each")


if __name__ == "__main__":
    main()
