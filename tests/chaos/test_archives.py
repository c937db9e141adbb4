"""The check of an archive finds every step that is missing or differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.episodes import episode
from harness.forging import WRITER, right_history
from harness.history import History
from harness.stored import archive_is_what_was_trained
from turnstream_server.batcher.assembly.archive import archive_path

RUN = "r"


def archive_step(history: History, folder: Path, step: int, **columns: Any) -> None:
    rows = history.rows(session=history.surviving[step], step=step)
    said = [
        episode(row["trajectory"], writer=WRITER).columns[row["sequence"]]._asdict() for row in rows
    ]
    table = {
        "trajectory_id": [row["trajectory"] for row in rows],
        "sequence_index": [row["sequence"] for row in rows],
        "reward": [row["reward"] for row in rows],
        **{name: [each[name] for each in said] for name in said[0]},
        **columns,
    }
    path = archive_path(folder, RUN, step)
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(table).replace_schema_metadata({"manifest_hash": f"m{step}"}), path)


def tear(_: History, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def change_plan(_: History, path: Path) -> None:
    pq.write_table(pq.read_table(path).replace_schema_metadata({"manifest_hash": "m9"}), path)


def drop_row(_: History, path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(1), path)


def repeat_trajectory(history: History, path: Path) -> None:
    first = history.rows(session=history.surviving[1], step=1)[0]["trajectory"]
    rows = history.rows(session=history.surviving[2], step=2)
    names = [first, *(row["trajectory"] for row in rows[1:])]
    archive_step(history, path.parents[1], 2, trajectory_id=names)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda _, path: path.unlink(), ["step 2 is released, and cannot be read"]),
        (tear, ["step 2 is released, and cannot be read"]),
        (change_plan, ["step 2 is archived as m9"]),
        (drop_row, ["the rows of step 2"]),
        (repeat_trajectory, ["the rows of step 2", "g0/0/0 is in 2 archived steps"]),
    ],
)
def test_wrong_archive_is_found(
    tmp_path: Path, spoil: Callable[[History, Path], None], found: list[str]
) -> None:
    history = History(right_history())
    for step in (1, 2, 3):
        archive_step(history, tmp_path, step)
    assert not [*archive_is_what_was_trained(history, tmp_path, run=RUN, released=3)]

    spoil(history, archive_path(tmp_path, RUN, 2))

    told = [*archive_is_what_was_trained(history, tmp_path, run=RUN, released=3)]
    assert all(text.startswith(start) for text, start in zip(told, found, strict=True))
