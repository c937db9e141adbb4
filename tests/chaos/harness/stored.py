"""The content of a store, compared with its acknowledgements.

The store is read before any process can resend. The run must have released nothing, and its trainer
must not have gone back.
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
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.embedded import EmbeddedServer


def lost_with(data_dir: Path, history: History, *, run: str, binary: Path | None) -> list[str]:
    """Return what another server acknowledged and a server with these data does not have.

    Args:
        data_dir: data of a killed server; they are copied.
        history: history that was read after the kill.
        run: name of the run.
        binary: program of the server.
    """
    copy = data_dir.with_name(f"{data_dir.name}-{len(list(data_dir.parent.iterdir()))}")
    shutil.copytree(data_dir, copy)
    with EmbeddedServer(copy, binary=binary) as server, connect(server.url) as client:
        return list(lost(client, history, run=run))


def lost(client: redis.Redis, history: History, *, run: str) -> Iterator[str]:
    """Yield acknowledged writes that are missing or different."""
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
    """Return the content of a key of any type; None without one.

    A `DUMP` would not do: a server that grows a hash may return its fields in another order.
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
