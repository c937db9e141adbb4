"""Fault 20: a trainer that comes back with another number of ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from harness.history import History, Line
from harness.rig import PATIENCE_S, Rig

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]

Whole = dict[tuple[int, int], tuple[list[dict[str, Any]], list[float]]]
"""(step, mini-batch) -> its rows, by number, and its denominators."""


def test_world_size_changes_from_four_to_three_to_four(rig: Rig) -> None:
    # Processes; each change throws away a step that was stepped, which comes again in the new cut.
    rig.start_batcher()
    rig.start_generator(groups=24)
    for world_size in (4, 3):
        ranks = rig.start_ranks(world_size, checkpoint_every=2, failpoint="train.after_stepped@3")
        ranks[0].wait(PATIENCE_S)
        assert ranks[0].status == -signal.SIGKILL
        for rank in ranks:
            rank.kill()

    rig.drain(4)

    history = rig.history()
    assert [session.dp_world_size for session in history.sessions] == [4, 3, 4]
    assert [session.updated for session in history.sessions] == [(1, 2, 3), (3, 4, 5), (5, 6)]
    four, three, last = (_whole(_received(history, each.name)) for each in history.sessions)
    for step, before, after in ((3, four, three), (5, three, last)):
        for mini_batch in range(2):
            assert before[step, mini_batch] == after[step, mini_batch]


def _received(history: History, session: str) -> Sequence[Line]:
    return [line for line in history.of("received") if line["session"] == session]


def _by_place(lines: Iterable[Line]) -> dict[tuple[int, int], list[Line]]:
    found: dict[tuple[int, int], list[Line]] = {}
    for line in lines:
        if line.kind == "received":
            found.setdefault((line["step"], line["mini_batch"]), []).append(line)
    return found


def _whole(lines: Iterable[Line]) -> Whole:
    """Return the rows and denominators of every mini-batch over all ranks."""
    found: Whole = {}
    for place, shares in _by_place(lines).items():
        rows = [row for share in shares for row in share["rows"]]
        denominators = shares[0]["denominators"]
        assert [share["denominators"] for share in shares] == [denominators] * len(shares)
        found[place] = sorted(rows, key=lambda row: row["row"]), denominators
    return found
