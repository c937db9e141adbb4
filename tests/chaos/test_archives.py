"""What is found of an archive that has not all of what was trained and released."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.archives import archive_is_what_was_trained
from harness.episodes import episode
from harness.forging import WRITER, right_history
from harness.history import History
from turnstream_server.batcher.archive import archive_path

RUN = "r"


def archive_all(history: History, folder: Path) -> None:
    """The files of the steps 1 to 3, as they were trained."""
    for step in (1, 2, 3):
        archive_one(history, folder, step)


def archive_one(history: History, folder: Path, step: int, **columns: Any) -> None:
    """The file of one step, but for these columns."""
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


def test_an_archive_of_all_that_is_released_is_right(tmp_path: Path) -> None:
    history = History(right_history())

    archive_all(history, tmp_path)

    assert not [*archive_is_what_was_trained(history, tmp_path, run=RUN, released=3)]


def it_is_gone(_: History, folder: Path) -> None:
    archive_path(folder, RUN, 2).unlink()


def it_is_torn(_: History, folder: Path) -> None:
    path = archive_path(folder, RUN, 2)
    path.write_bytes(path.read_bytes()[:-9])


def it_is_of_another_plan(_: History, folder: Path) -> None:
    path = archive_path(folder, RUN, 2)
    pq.write_table(pq.read_table(path).replace_schema_metadata({"manifest_hash": "m9"}), path)


def it_has_another_reward(history: History, folder: Path) -> None:
    rows = history.rows(session=history.surviving[2], step=2)
    archive_one(history, folder, 2, reward=[row["reward"] + 1 for row in rows])


def it_has_a_row_less(_: History, folder: Path) -> None:
    path = archive_path(folder, RUN, 2)
    pq.write_table(pq.read_table(path).slice(1), path)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (it_is_gone, "step 2 is released, and cannot be read"),
        (it_is_torn, "step 2 is released, and cannot be read"),
        (it_is_of_another_plan, "step 2 is archived as m9"),
        (it_has_another_reward, "the rows of step 2"),
        (it_has_a_row_less, "the rows of step 2"),
    ],
)
def test_what_is_missing_or_other_in_an_archive_is_found(
    tmp_path: Path, spoil: Callable[[History, Path], None], told: str
) -> None:
    history = History(right_history())
    archive_all(history, tmp_path)

    spoil(history, tmp_path)

    (found,) = archive_is_what_was_trained(history, tmp_path, run=RUN, released=3)
    assert found.startswith(told)
    assert not [*archive_is_what_was_trained(history, tmp_path, run=RUN, released=1)]


def test_a_trajectory_in_two_archived_steps_is_found(tmp_path: Path) -> None:
    history = History(right_history())
    archive_all(history, tmp_path)
    first = history.rows(session=history.surviving[1], step=1)[0]["trajectory"]
    rows = history.rows(session=history.surviving[2], step=2)

    archive_one(
        history, tmp_path, 2, trajectory_id=[first, *(row["trajectory"] for row in rows[1:])]
    )

    found = [*archive_is_what_was_trained(history, tmp_path, run=RUN, released=3)]
    assert f"{first} is in 2 archived steps" in found
