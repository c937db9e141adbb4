"""The cost of durability: the append-only file, and a sync to disk before every answer.

    make bench                                   # with the others
    python benchmarks/durability.py --tiny       # a quick look

Two questions, each answered by ratios inside one run:

- `everysec`: which share of the throughput does the append-only file take from publishers, and
  which from bare pipelined writes of the same bytes? Those write the very records that publishers
  had stored, one command each. Each pair of runs, with the file and without it, follows one
  another, and so do ours and the bare one.
- `fsync`: how many turns of 4 kB per second do publishers bring to disk, and how many one
  connection that waits for each answer? Where a sync takes less than 1 ms, 1 ms is added to it: a
  fast disk hides what the sync costs on others.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from processes import Role, serve_role
from workload import GROUP_SIZE, make_groups

HERE = Path(__file__)
TURN_TOKENS = 1000
OPEN_TRAJECTORIES = 128
NUM_PUBLISHERS = 2
SLOW_SYNC_S = 1e-3
FULL = {"groups": 512, "turns": 20_000, "naive": 500, "rounds": 5}
TINY = {"groups": 2, "turns": 200, "naive": 20, "rounds": 1}

_DELAY_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
#define SLOW(name) int name(int file) { \\
  static int (*real)(int); \\
  if (!real) real = dlsym(RTLD_NEXT, #name); \\
  usleep(1000); \\
  return real(file); }
SLOW(fsync)
SLOW(fdatasync)
"""


# ------------------------------------------------------------------------------ roles


def start_publisher(config: dict[str, Any]) -> Any:
    """Publish whole groups one by one, as they finish."""
    from turnstream.generator import Publisher
    from turnstream.store.client import server_checks

    groups = make_groups(config["groups"])
    # Every second round measures a store without its file, which each connection refuses.
    server_checks.unsafe_server = lambda *_, **__: None

    def work(message: dict[str, Any]) -> dict[str, Any]:
        with Publisher(config["redis_url"], message["run"]) as publisher:
            start_s = time.monotonic()
            for group in groups:
                publisher.publish(group)
            publisher.flush()
            return {"wall_s": time.monotonic() - start_s}

    return work


def start_bare(config: dict[str, Any]) -> Any:
    """Write the records that publishers have stored once more, in pipelines of a group each."""
    client = redis.Redis.from_url(config["redis_url"])
    pipelines: list[list[tuple[str, bytes]]] = []

    def work(message: dict[str, Any]) -> dict[str, Any]:
        if message.get("learns"):
            pipelines[:] = _stored_groups(client)
            return {}
        start_s = time.monotonic()
        for records in pipelines:
            pipeline = client.pipeline(transaction=False)
            for stream, record in records:
                pipeline.xadd(stream, {b"r": record})
            pipeline.execute()
        return {"wall_s": time.monotonic() - start_s}

    return work


def _stored_groups(client: redis.Redis) -> list[list[tuple[str, bytes]]]:
    """Return the stored records of a run as plain writes: streams and records, by group.

    The records of a trajectory go to a stream of their own, and all events to one, as in the run.
    """
    streams = _stored_records(client)
    events = next(records for name, records in streams.items() if name.endswith(b":events"))
    turns = [streams[name] for name in sorted(streams) if name.endswith(b":turns")]
    groups = [turns[first : first + GROUP_SIZE] for first in range(0, len(turns), GROUP_SIZE)]
    told = len(events) // len(groups)
    if told * len(groups) != len(events):
        raise ValueError(f"{len(events)} events are not as many for each of {len(groups)} groups")
    return [
        [
            *((f"bare:{index}:{n}", each) for n, turn in enumerate(group) for each in turn),
            *(("bare:events", each) for each in events[index * told : (index + 1) * told]),
        ]
        for index, group in enumerate(groups)
    ]


def _stored_records(client: redis.Redis) -> dict[bytes, list[bytes]]:
    """The records of every stream that there is."""
    found: dict[bytes, list[bytes]] = {}
    for name in client.scan_iter(count=1000, _type="stream"):
        entries: Any = client.xrange(name)
        records = [fields[b"r"] for _, fields in entries if b"r" in fields]
        if records:
            found[name] = records
    return found


def start_naive(config: dict[str, Any]) -> Any:
    """Write one record after another on one connection, waiting for each answer."""
    client = redis.Redis.from_url(config["redis_url"])
    record = os.urandom(4 * TURN_TOKENS)

    def work(message: dict[str, Any]) -> dict[str, Any]:
        start_s = time.monotonic()
        for _ in range(message["num_turns"]):
            client.xadd("naive", {b"r": record})
        return {"wall_s": time.monotonic() - start_s}

    return work


def start_appender(config: dict[str, Any]) -> Any:
    """Append turns to many open trajectories by turns, as a generator of many episodes does."""
    import numpy as np

    from turnstream.generator import Publisher

    rng = np.random.default_rng(config["name"])
    prompt = np.arange(8, dtype=np.int32)
    responses = [rng.integers(0, 150_000, TURN_TOKENS, dtype=np.int32) for _ in range(64)]

    def work(message: dict[str, Any]) -> dict[str, Any]:
        names = [f"{config['name']}-{index}" for index in range(OPEN_TRAJECTORIES)]
        with Publisher(config["redis_url"], message["run"]) as publisher:
            episodes = [publisher.trajectory(name, 0, num_samples=1) for name in names]
            for episode in episodes:
                episode.__enter__()
            start_s = time.monotonic()
            for number in range(message["num_turns"]):
                episodes[number % len(episodes)].append(prompt, responses[number % 64])
            publisher.flush()
            wall_s = time.monotonic() - start_s
            for episode in episodes:
                episode.abandon("measured")
        return {"wall_s": wall_s}

    return work


def _start_role(name: str) -> Any:
    return {
        "publisher": start_publisher,
        "bare": start_bare,
        "naive": start_naive,
        "appender": start_appender,
    }[name]


# ------------------------------------------------------------------------------ everysec


def measure_everysec(*, num_groups: int, pairs: int) -> dict[str, Any]:
    """The share of throughput that the append-only file takes, of ours and of bare writes."""
    shares: dict[str, list[float]] = {"publisher": [], "bare": []}
    stored: dict[str, dict[str, int]] = {}
    with _server("everysec") as server:
        client = redis.Redis.from_url(server.url)
        common = {"redis_url": server.url, "groups": num_groups}
        roles = {name: Role(HERE, name, common) for name in shares}
        _timed_ingest(client, roles["publisher"], "warm-up", is_on=True)
        roles["bare"].send({"learns": True})
        roles["bare"].receive()
        for pair in range(pairs + 1):  # the first one warms up
            for name, role in roles.items():
                wall_s: dict[bool, float] = {}
                for is_on in (True, False) if pair % 2 else (False, True):
                    run = f"{name}-{pair}-{is_on}"
                    wall_s[is_on] = _timed_ingest(client, role, run, is_on=is_on)
                    stored[name] = _size(client)
                if pair:
                    shares[name].append(1 - wall_s[False] / wall_s[True])
        for role in roles.values():
            role.stop()
    if stored["publisher"] != stored["bare"]:
        raise ValueError(f"the bytes are not the same: {stored}")
    medians = {name: statistics.median(values) for name, values in shares.items()}
    points = 100 * (medians["publisher"] - medians["bare"])
    return {"pairs": shares, **medians, "points": points, "stored": stored}


def _size(client: redis.Redis) -> dict[str, int]:
    """Return number and bytes of all records in a server."""
    records = [record for each in _stored_records(client).values() for record in each]
    return {"records": len(records), "bytes": sum(map(len, records))}


def _timed_ingest(client: redis.Redis, role: Role, run: str, *, is_on: bool) -> float:
    client.flushall()
    client.config_set("appendonly", "yes" if is_on else "no")
    _wait_for_rewrite(client)
    _create_run(client, run)
    role.send({"run": run})
    return role.receive()["wall_s"]


def _wait_for_rewrite(client: redis.Redis) -> None:
    while True:
        state: Any = client.info("persistence")
        if not state["aof_rewrite_in_progress"] and not state["aof_rewrite_scheduled"]:
            return
        time.sleep(0.01)


# ------------------------------------------------------------------------------ fsync


def measure_fsync(*, num_turns: int, num_naive: int, rounds: int) -> dict[str, Any]:
    """Turns per second that are on disk when they are acknowledged: ours, and one connection's."""
    with tempfile.TemporaryDirectory() as folder:
        sync_s = _sync_s(Path(folder))
        environment = {} if sync_s >= SLOW_SYNC_S else _delayed(Path(folder))
        ours: list[float] = []
        naive: list[float] = []
        with _environment(environment), _server("fsync") as server:
            client = redis.Redis.from_url(server.url)
            role = Role(HERE, "naive", {"redis_url": server.url})
            appenders = [
                Role(HERE, "appender", {"redis_url": server.url, "name": index})
                for index in range(NUM_PUBLISHERS)
            ]
            for number in range(rounds):
                client.flushall()
                role.send({"num_turns": num_naive})
                naive.append(num_naive / role.receive()["wall_s"])
                _create_run(client, f"run-{number}")
                for appender in appenders:
                    appender.send({"run": f"run-{number}", "num_turns": num_turns})
                slowest_s = max([appender.receive()["wall_s"] for appender in appenders])
                ours.append(num_turns * len(appenders) / slowest_s)
            for each in (role, *appenders):
                each.stop()
    ratios = [fast / slow for fast, slow in zip(ours, naive, strict=True)]
    return {
        "sync_ms": 1e3 * sync_s,
        "is_delayed": bool(environment),
        "publishers": NUM_PUBLISHERS,
        "turns_per_s": statistics.median(ours),
        "naive_per_s": statistics.median(naive),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "goal": 20 if environment or sync_s >= SLOW_SYNC_S else 8,
    }


def _sync_s(folder: Path) -> float:
    """Seconds that forcing 4 kB at the end of a file takes, the median of 50."""
    seconds: list[float] = []
    with (folder / "sync").open("wb", buffering=0) as file:
        for _ in range(50):
            file.write(os.urandom(4096))
            start_s = time.perf_counter()
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)


def _delayed(folder: Path) -> dict[str, str]:
    """An environment in which every sync takes 1 ms longer; empty without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return {}
    source, library = folder / "slow.c", folder / "slow.so"
    source.write_text(_DELAY_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


# ------------------------------------------------------------------------------ parts of both


@contextmanager
def _server(durability: Any) -> Iterator[Any]:
    from turnstream_server.embedded import EmbeddedServer

    with EmbeddedServer(durability=durability) as server:
        yield server


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """The environment of processes that are started inside, the server's among them."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _create_run(client: redis.Redis, run: str) -> None:
    from turnstream.batching.config import BatchingConfig
    from turnstream.store.run.runs import create_run

    create_run(client, run, BatchingConfig(batch_groups=100_000, mini_batch_groups=100_000))


def report(everysec: dict[str, Any], fsync: dict[str, Any]) -> None:
    """Print both answers."""
    print("everysec: share of the throughput that the append-only file takes (median of pairs)")
    for name, title in (("publisher", "publishers"), ("bare", "bare pipelined writes")):
        pairs = " ".join(f"{100 * share:.0f}" for share in everysec["pairs"][name])
        size = everysec["stored"][name]
        what = f"{size['bytes']} bytes in {size['records']} records"
        print(f"  {title:<28} {100 * everysec[name]:5.1f} %   [{pairs}]   {what}")
    print(f"  difference                   {everysec['points']:5.1f} points   (goal: at most 5)\n")
    delayed = ", and 1 ms is added" if fsync["is_delayed"] else ""
    print(f"fsync: turns of 4 kB per second; a sync takes {fsync['sync_ms']:.2f} ms{delayed}")
    print(f"  {fsync['publishers']} publishers                 {fsync['turns_per_s']:7.0f}")
    print(f"  one connection, one by one   {fsync['naive_per_s']:7.0f}")
    ratios = " ".join(f"{ratio:.1f}" for ratio in fsync["ratios"])
    goal = f"(goal: {fsync['goal']})"
    print(f"  ratio                        {fsync['ratio']:7.1f} x   [{ratios}]  {goal}")


def main() -> None:
    """Measure both, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.role:
        serve_role(_start_role(arguments.role))
        return
    sizes = TINY if arguments.tiny else FULL
    everysec = measure_everysec(num_groups=sizes["groups"], pairs=sizes["rounds"])
    fsync = measure_fsync(
        num_turns=sizes["turns"], num_naive=sizes["naive"], rounds=sizes["rounds"]
    )
    report(everysec, fsync)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"everysec": everysec, "fsync": fsync}, indent=2))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
