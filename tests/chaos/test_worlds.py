"""Fault 20: a trainer that comes back with another number of ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
import pytest

from harness.checker import check
from harness.history import History, Line
from harness.rank import describe
from harness.rig import PATIENCE_S, Rig
from turnstream.worker import BatchStream

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]

Whole = dict[tuple[int, int], tuple[list[dict[str, Any]], list[float]]]
"""(step, mini-batch) -> its rows, by number, and its denominators."""


def test_the_world_may_change_from_four_to_three_to_four(rig: Rig) -> None:
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


def test_a_world_of_eight_then_six_then_eight_gets_the_same_rows_in_another_cut(
    start_rig: Callable[..., Rig],
) -> None:
    # Ranks are threads here; each world begins behind the same checkpoint.
    rig = start_rig()
    rig.start_batcher()
    rig.join(rig.start_generator(groups=8, samples=3))
    worlds = {
        name: _pull_all(rig, session=name, dp_world_size=size, num_steps=2)
        for name, size in (("eight", 8), ("six", 6), ("again", 8))
    }

    check(History(chain(rig.history().lines, *worlds.values())), counts=rig.counts())

    eight, six, again = (_whole(lines) for lines in worlds.values())
    assert eight.keys() == {(step, mini_batch) for step in (1, 2) for mini_batch in range(2)}
    assert eight == six == again
    assert _cut(worlds["eight"]) == _cut(worlds["again"])
    assert _cut(worlds["eight"]) != _cut(worlds["six"])
    for name, size in (("eight", 8), ("six", 6)):
        assert _num_inert(worlds[name]) == {
            place: -len(rows) % size for place, (rows, _) in eight.items()
        }


def _pull_all(rig: Rig, *, session: str, dp_world_size: int, num_steps: int) -> list[Line]:
    """What all ranks of a session get of the first steps; none of them acknowledges anything."""

    def pull(dp_rank: int) -> list[Line]:
        who = {"session": session, "dp_rank": dp_rank, "dp_world_size": dp_world_size}
        process = f"{session}-{dp_rank}"
        lines = [Line(process, "session", 0.0, {"token": None, "after_step": 0, **who})]
        with BatchStream(
            rig.address(), rig.run, dp_rank, dp_world_size, session=session, timeout_s=PATIENCE_S
        ) as stream:
            for mini_batch in stream:
                padding = mini_batch.rows.is_padding
                trained = [np.any(mask) for mask in mini_batch.rows.loss_mask]
                assert not np.any(padding & trained)
                facts = {**who, **describe(mini_batch), "num_inert": int(padding.sum())}
                lines.append(Line(process, "received", 0.0, facts))
                if mini_batch.is_last and mini_batch.info.step == num_steps:
                    return lines
        raise AssertionError(f"the run ended before step {num_steps}")

    with ThreadPoolExecutor(dp_world_size) as threads:
        return list(chain.from_iterable(threads.map(pull, range(dp_world_size))))


def _received(history: History, session: str) -> Sequence[Line]:
    return [line for line in history.of("received") if line["session"] == session]


def _by_place(lines: Iterable[Line]) -> dict[tuple[int, int], list[Line]]:
    found: dict[tuple[int, int], list[Line]] = {}
    for line in lines:
        if line.kind == "received":
            found.setdefault((line["step"], line["mini_batch"]), []).append(line)
    return found


def _whole(lines: Iterable[Line]) -> Whole:
    """What all ranks have together of every mini-batch; all name the same denominators."""
    found: Whole = {}
    for place, shares in _by_place(lines).items():
        rows = [row for share in shares for row in share["rows"]]
        denominators = shares[0]["denominators"]
        assert [share["denominators"] for share in shares] == [denominators] * len(shares)
        found[place] = sorted(rows, key=lambda row: row["row"]), denominators
    return found


def _cut(lines: Iterable[Line]) -> dict[tuple[int, int], dict[int, list[int]]]:
    """Of every mini-batch the rows of each rank."""
    return {
        place: {share["dp_rank"]: [row["row"] for row in share["rows"]] for share in shares}
        for place, shares in _by_place(lines).items()
    }


def _num_inert(lines: Iterable[Line]) -> dict[tuple[int, int], int]:
    """Of every mini-batch the rows that fill the ranks up."""
    return {
        place: sum(share["num_inert"] for share in shares)
        for place, shares in _by_place(lines).items()
    }
