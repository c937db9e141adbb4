"""The archive folder of a run must contain each released step once, as it was trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.episodes import row_name
from harness.history import History
from turnstream_server.batcher.assembly.archive import archive_path

Violations = Iterator[str]

_COLUMNS = ("trajectory_id", "sequence_index", "input_ids", "loss_mask", "prompt_length", "reward")


def archive_is_what_was_trained(
    history: History, folder: Path, *, run: str, released: int
) -> Violations:
    """Each released step is in the archive, readable, with the rows that the ranks received.

    Args:
        history: history of a run that was trained to its end.
        folder: archive folder.
        run: name of the run.
        released: newest released step.
    """
    found: Counter[str] = Counter()
    trained = {line["step"]: line for line in history.of("updated") if _survives(history, line)}
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
        rows = _rows(table)
        found.update({row[0] for row in rows})
        if rows != _trained_rows(history, step):
            yield f"the rows of step {step} in the archive are not those that were trained"
    yield from (f"{name} is in {num} archived steps" for name, num in found.items() if num > 1)


def _survives(history: History, line: Any) -> bool:
    return history.surviving.get(line["step"]) == line["session"]


def _rows(table: pa.Table) -> list[tuple[str, int, str, float]]:
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
