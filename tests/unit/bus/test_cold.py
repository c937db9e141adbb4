from __future__ import annotations

from pathlib import Path

import pytest

from turnstream_server.bus.release.ledger_files import LedgerFolder


@pytest.mark.parametrize(
    ("hot_batches", "cold", "folded", "steps"),
    [
        (2, 0, 3, range(0)),  # one batch is not hot, and a file takes two
        (2, 0, 4, range(1, 3)),
        (2, 2, 5, range(0)),
        (2, 2, 6, range(3, 5)),
        (1000, 0, 1255, range(0)),
        (1000, 0, 1256, range(1, 257)),
    ],
)
def test_file_is_due_when_its_batches_are_older_than_the_hot_ones(
    hot_batches: int, cold: int, folded: int, steps: range
) -> None:
    place = LedgerFolder(folder=Path("archive"), hot_batches=hot_batches)

    assert [*place.next_steps(cold=cold, folded=folded)] == [*steps]
