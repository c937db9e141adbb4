"""What a store has, compared with what it told everybody that it has.

Publishers send again what a store forgot, so that a run which is trained to its end says little of
what was lost on the way. Here the store is asked before anybody could send anything again. Of a
run that has released nothing, and whose trainer has not gone back.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import redis

from harness.episodes import episode
from harness.history import History, Line
from turnstream.records.turns import decode_turn
from turnstream.store import keys
from turnstream.store.connection import connect
from turnstream_server.bus.frontier import read_frontier
from turnstream_server.embedded import EmbeddedServer


def lost_with(data_dir: Path, history: History, *, run: str, binary: Path | None) -> list[str]:
    """What a server that starts with these data does not have, and another had acknowledged.

    Args:
        data_dir: of a server that was killed; it is copied.
        history: read after the kill: what is not in it was not acknowledged, or may be missing.
        run: name of the run.
        binary: the server to ask.
    """
    copy = data_dir.with_name(f"{data_dir.name}-{len(list(data_dir.parent.iterdir()))}")
    shutil.copytree(data_dir, copy)
    with EmbeddedServer(copy, binary=binary) as server, connect(server.url) as client:
        return list(lost(client, history, run=run))


def lost(client: redis.Redis, history: History, *, run: str) -> Iterator[str]:
    """What was acknowledged and is not there, or is something else."""
    groups: Any = client.hgetall(keys.run_keys(run).groups)
    for line in history.of("opened"):
        if keys.encode_name(line["group"]).encode() not in groups:
            yield f"the opening of {line['group']}"
    for line in history.of("appended"):
        if not _has_turn(client, run, line):
            yield f"turn {line['turn']} of {line['trajectory']}"
    ledger: Any = client.hgetall(keys.run_keys(run).ledger)
    for name in sorted(history.acknowledged):
        if ledger.get(name.encode(), b"open").startswith(b"open"):
            yield f"the seal of {name}"
    frontier = read_frontier(client, run)
    reached = {"stepped": frontier.stepped, "committed": frontier.committed}
    for line in history.of("stepped", "committed"):
        if line["step"] > reached[line.kind]:
            yield f"{line.kind} of step {line['step']}"


def _has_turn(client: redis.Redis, run: str, line: Line) -> bool:
    name, turn = line["trajectory"], line["turn"]
    stream = keys.trajectory_keys(run, name).turns
    entries: Any = client.xrange(stream, f"0-{turn + 1}", f"0-{turn + 1}")
    writer = line.process.removeprefix("generator-")
    said = episode(name, writer=writer).turns[turn].response_ids
    return bool(entries) and np.array_equal(decode_turn(entries[0][1][b"r"]).response_ids, said)


def content_of(client: redis.Redis, name: bytes | str) -> Any:
    """What a key holds, of whatever kind it is; None where it is not there.

    Not its `DUMP`: a server that moves a hash to a larger table may give the same fields in another
    order.
    """
    kind: Any = client.type(name)
    readers: dict[bytes, Callable[[bytes | str], Any]] = {
        b"none": lambda name: None,
        b"string": client.get,
        b"hash": client.hgetall,
        b"stream": client.xrange,
        b"set": client.smembers,
        b"zset": lambda name: client.zrange(name, 0, -1, withscores=True),
    }
    return readers[kind](name)
