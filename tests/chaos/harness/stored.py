"""The content of a store and of its archive, compared with the logs of processes.

The store is read before any process can resend. The run must have released nothing, and its trainer
must not have gone back.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import redis

from harness.episodes import episode, row_name
from harness.history import History, Line, Violations
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream_server.batcher.assembly.archive import archive_path
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.core.frontier import read_frontier


def lost_with(data_dir: Path, history: History, *, run: str, binary: Path | None) -> list[str]:
    """Return what a killed server acknowledged and a server with a copy of its data lacks."""
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


_COLUMNS = ("trajectory_id", "sequence_index", "input_ids", "loss_mask", "prompt_length", "reward")


def archive_is_what_was_trained(
    history: History, folder: Path, *, run: str, released: int
) -> Violations:
    """Each released step is in the archive, readable, with the rows that the ranks received."""
    found: Counter[str] = Counter()
    trained = {line["step"]: line for line in history.of("updated") if history.survives(line)}
    for step in range(1, released + 1):
        path = archive_path(folder, run, step)
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            yield f"step {step} is released, and cannot be read from the archive: {error!r}"
            continue
        said = (table.schema.metadata or {}).get(b"manifest_hash", b"").decode()
        if step not in trained or said != trained[step]["manifest"]:
            yield f"step {step} is archived as {said}, not as it was trained"
            continue
        rows = _archived_rows(table)
        found.update({row[0] for row in rows})
        if rows != _trained_rows(history, step):
            yield f"the rows of step {step} in the archive are not those that were trained"
    yield from (f"{name} is in {num} archived steps" for name, num in found.items() if num > 1)


def _archived_rows(table: pa.Table) -> list[tuple[str, int, str, float]]:
    """(trajectory, sequence, name of the tokens, reward) of each row, in order."""
    return sorted(
        (
            row["trajectory_id"],
            row["sequence_index"],
            row_name(row["input_ids"], row["loss_mask"], prompt_length=row["prompt_length"]),
            row["reward"],
        )
        for row in table.select(_COLUMNS).to_pylist()
    )


def _trained_rows(history: History, step: int) -> list[tuple[str, int, str, float]]:
    rows = history.rows(session=history.surviving[step], step=step)
    return sorted((row["trajectory"], row["sequence"], row["name"], row["reward"]) for row in rows)
