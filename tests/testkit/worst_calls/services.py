"""The most expensive calls of trainers, observers, operators, and of hosted models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from testkit.runs.scripts import script
from testkit.worst_calls.store import NAME, Build, LimitStore, worst
from turnstream.store.client.keys import incarnation_key, run_keys
from turnstream.store.client.scripts import Command
from turnstream.types import RecoveryToken
from turnstream_server.batcher.serving.requests import MAX_DP_WORLD_SIZE
from turnstream_server.ledger.admin.forks import MAX_VERSIONS
from turnstream_server.ledger.core.frontier import parse_frontier
from turnstream_server.ledger.leadership.writes import Changes
from turnstream_server.ledger.sessions import session_writes
from turnstream_server.ledger.sessions.observers import (
    MOST_FORGOTTEN,
    MOST_OBSERVERS,
    MOST_OF_OWNER,
)
from turnstream_server.ledger.sessions.session_writes import Facts, TrainerRank
from turnstream_server.operations.log import MAX_AHEAD, MAX_SHARED, MAX_SHARED_BYTES

WORST: Final[dict[str, Build]] = {}

CONSTANT: Final = {
    "acquire": "single fields of one model",
    "create_model": "single fields of a new model",
    "discard_dead_letter": "single fields of one trajectory",
    "drop_expired": "one field",
    "drop_result": "one field of one model",
    "essential_write": "one command, whose words its callers limit",
    "finish_sample": "one field; its result has the limit of the gateway",
    "observed": "one observer",
    "renew": "single fields of one model",
    "submit": "single fields; its content has the limit of the gateway",
    "submit_sample": "single fields",
}

HASH: Final = "f" * 64
UNDONE: Final = 10_000
"""Steps after the last checkpoint, which a trainer that starts again undoes."""


def facts_with_ranks(store: LimitStore, kind: str, entry: str, step: int, **fields: Any) -> Facts:
    """Return the facts of a session of the most ranks, of which all but the last have called."""
    session = {"session_epoch": 1, "session": "s", "dp_world_size": MAX_DP_WORLD_SIZE}
    store.fill(store.keys.frontier, {**session, "planned": 1, **fields}.items())
    store.fill(store.keys.batches, [("1", f"1:{HASH}")])
    ranks = range(MAX_DP_WORLD_SIZE - 1)
    store.fill(store.keys.ranks, ((f"{kind}:{rank}", entry) for rank in ranks))
    stored: Any = store.client.hgetall(store.keys.frontier)
    frontier = parse_frontier(store.run, stored)
    return Facts(9**13, frontier, stored, step, b"1:%s" % HASH.encode() if step else None)


LAST_RANK: Final = TrainerRank(1, "s", MAX_DP_WORLD_SIZE - 1)


def stepped(store: LimitStore) -> Sequence[Changes]:
    """The last of the most ranks."""
    facts = facts_with_ranks(store, "stepped", f"1:{HASH}", 1)
    return session_writes.step(facts, LAST_RANK, manifest_hash=HASH)[1]


def committed(store: LimitStore) -> Sequence[Changes]:
    """The last of the most ranks, after many checkpoints."""
    checkpoints = ",".join(map(str, range(20_000)))
    facts = facts_with_ranks(store, "committed", "1", 1, stepped=1, checkpoints=checkpoints)
    return session_writes.commit(facts, LAST_RANK, chain_hash=HASH)[1]


def started(store: LimitStore) -> Sequence[Changes]:
    """A trainer that goes back to the beginning of a long run."""
    steps = {"stepped": UNDONE, "planned": UNDONE, "checkpoints": ",".join(map(str, range(UNDONE)))}
    facts = facts_with_ranks(store, "stepped", f"1:{HASH}", 0, **steps)
    for kind in ("stepped", "committed"):
        store.fill(store.keys.times, ((f"{kind}:{step}", 9**13) for step in range(UNDONE)))
    token = RecoveryToken(lineage="main", step=0, chain_hash="")
    sizes = {"dp_world_size": MAX_DP_WORLD_SIZE}
    return session_writes.start(facts, session=NAME, token=token, **sizes)[1]


SESSION_BUILDS: Final = (started, stepped, committed)
"""Builders of the most expensive calls of trainer sessions, which `leader_write` writes."""


@worst(WORST)
def observe(store: LimitStore) -> list[Command]:
    """A further observer of a run with the most observers, live and expired."""
    live = (
        (f"{number:03}{NAME[3:]}", "1:9999999999999:1000@o") for number in range(MOST_OBSERVERS - 1)
    )
    expired = ((f"e{number:03}{NAME[4:]}", "1:0:1000@o") for number in range(MOST_FORGOTTEN))
    store.fill(store.keys.frontier, [("stepped", 1), ("planned", 1)])
    store.fill(store.keys.observers, [*live, *expired])
    words = (NAME, 1, 1_000, "x", 0, MOST_OF_OWNER, MOST_OBSERVERS)
    return [store.call("observe", *words)]


@worst(WORST)
def begin_delete(store: LimitStore) -> list[Command]:
    """A run with many revisions of its config."""
    config = store.client.hget(store.keys.config, "1") or b""
    store.fill(store.keys.config, ((str(n), bytes(config)) for n in range(1, 10_001)))  # pyright: ignore[reportArgumentType]
    store.fill(store.keys.config, [("newest", "10000"), ("last", "10000")])
    return [script("begin_delete")(store.keys.of_begin_delete, 900_000, 15, store.run.incarnation)]


@worst(WORST)
def read_ledger(store: LimitStore) -> list[Command]:
    """Every state, and a conflict."""
    store.fill(store.keys.counts, ((f"{number}", 10**9) for number in range(30)))
    store.fill(store.keys.conflicts, [("num", 9), ("last", NAME)])
    return [store.call("read_ledger")]


@worst(WORST)
def fork_run(store: LimitStore) -> list[Command]:
    """The most versions."""
    names = run_keys(f"{store.run.name}-fork")
    where = (
        *(names.frontier, names.config, names.counts, names.batches, names.snapshot),
        *(names.versions, names.clock, incarnation_key(f"{store.run.name}-fork")),
    )
    versions = [word for n in range(MAX_VERSIONS) for word in (n, b"v" * 4_500)]
    words = (f"r:1:1:{HASH}", "{}", "main", 1, 1, b"s" * 1_000_000, 1)
    return [script("fork_run")(where, *words, *versions)]


@worst(WORST)
def create_key(store: LimitStore) -> list[Command]:
    """Many keys, with names that are alike."""
    record = {"name": "", "runs": ["run"] * 10, "roles": ["read"]}
    name = "n" * 128
    for number in range(5_000):
        record["name"] = f"{number:05}{name[5:]}"
        text = json.dumps(record, separators=(",", ":"))
        store.client.hset(store.keys.finished_batches, f"{number:064}", text)
    return [
        script("create_key")((store.keys.finished_batches,), HASH, "{}", name, f'"name":"{name}"')
    ]


MODEL: Final = "tm:{worst}:"


def model(store: LimitStore, *, results: int, commands: int) -> list[str]:
    """Write a model with as many results and commands; return its keys."""
    prefix = f"{MODEL[:-2]}-{store.run.name}}}:"
    names = [prefix + each for each in ("model", "commands", "bodies", "results", "passes")]
    state = [("epoch", 1), ("next", 0), ("submitted", commands), ("covered", -1)]
    store.fill(names[0], state)
    numbers = [str(number) for number in range(commands)]
    store.fill(names[1], ((each, f"forward {HASH}") for each in numbers))
    store.fill(names[2], ((each, b"b" * 100) for each in numbers))
    store.fill(names[3], ((str(number), b"r" * 100) for number in range(results)))
    return names


@worst(WORST)
def finish(store: LimitStore) -> list[Command]:
    """The most results of one call, after which the most numbers are skipped."""
    names = model(store, results=0, commands=MAX_AHEAD)
    store.fill(names[3], ((str(n), b"r" * 100) for n in range(MAX_SHARED, MAX_AHEAD)))
    size = 1 << 16
    results = [word for n in range(MAX_SHARED) for word in (n, b"r" * size)]
    return [script("finish")(names[:4], 1, 0, *results)]


@worst(WORST)
def keep_results(store: LimitStore) -> list[Command]:
    """As many results as one model may have in its log, next to those of many others."""
    results = f"tm:results-{store.run.name}"
    store.client.zadd(results, {f"S{n}:train:0:1": n for n in range(100_000)})
    requests = [f"S:train:0:{number}" for number in range(MAX_AHEAD)]
    return [script("keep_results")((results,), 3_600_000, 0, *requests)]


@worst(WORST)
def take(store: LimitStore) -> list[Command]:
    """The most commands that share a pass; and the most that a missing number fails."""
    names = model(store, results=0, commands=MAX_SHARED)
    words = (1, 0, 0, MAX_SHARED, MAX_SHARED_BYTES, "E" * 100, "E" * 100)
    other = store.configured()
    lost = model(other, results=0, commands=MAX_AHEAD)
    store.client.hdel(lost[1], "0")
    gap = {"gap_seq": 0, "gap_ms": 0}
    store.fill(lost[0], gap.items())
    return [script("take")(names, *words), script("take")(lost, *words)]


@worst(WORST)
def cover(store: LimitStore) -> list[Command]:
    """Many commands that no checkpoint covered."""
    names = model(store, results=0, commands=50_000)
    store.fill(names[4], ((str(number), number) for number in range(50_000)))
    return [script("cover")((names[0], names[2], names[4]), 1, 0, 49_999, NAME)]
