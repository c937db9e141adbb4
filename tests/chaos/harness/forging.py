"""A correct history that no process wrote, and ways to make it wrong."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from harness.episodes import episode
from harness.history import Line

Lines = list[Line]

WRITER = "w"
NUM_STEPS = 4


class Writing:
    """Lines in order, one tick apart."""

    def __init__(self) -> None:
        self.lines: Lines = []
        self._clock = itertools.count()

    def add(self, process: str, kind: str, **facts: Any) -> None:
        """Append one."""
        self.lines.append(Line(process, kind, float(next(self._clock)) / 1000, facts))


def right_history() -> Lines:
    """Two trainers of two ranks: the second begins behind step 2 of the three that the first took.

    Every step has two groups of two, each group a mini-batch of its own.
    """
    writing = Writing()
    for group in range(2 * NUM_STEPS):
        write_group(writing, f"g{group}")
    for step in range(1, NUM_STEPS + 1):
        epoch = 1 + step // 3
        who = f"batcher-{epoch}"
        writing.add(who, "planned", step=step, epoch=epoch, manifest=f"m{step}")
    write_session(writing, "first", after_step=0, steps=[1, 2, 3], commits=[2])
    write_session(writing, "second", after_step=2, steps=[3, 4], commits=[4])
    return writing.lines


def write_group(writing: Writing, group: str) -> None:
    writing.add("generator", "opening", group=group, num_samples=2)
    writing.add("generator", "waiting", what="admission", deadline_s=1.0)
    writing.add("generator", "waited", what="admission", outcome="")
    writing.add("generator", "opened", group=group, num_samples=2)
    for sample in range(2):
        name = f"{group}/{sample}/0"
        said = episode(name, writer=WRITER)
        writing.add(
            "generator",
            "sealing",
            trajectory=name,
            writer=WRITER,
            reward=said.reward,
            rows=list(said.rows),
            num_trained=list(said.num_trained),
        )
        writing.add("generator", "sealed", trajectory=name)
    writing.add("generator", "alive", max_rss_bytes=1000, held_bytes=5, max_held_bytes=10)


def lose_group(lines: Lines) -> Lines:
    writing = Writing()
    write_group(writing, "g99")
    later = [replace(line, at=line.at + 10.0) for line in writing.lines]
    return [*lines, *later]


def write_session(
    writing: Writing, session: str, *, after_step: int, steps: list[int], commits: list[int]
) -> None:
    whose = [{"session": session, "dp_rank": rank, "dp_world_size": 2} for rank in range(2)]
    names = [f"{session}-{rank}" for rank in range(2)]
    for name, who in zip(names, whose, strict=True):
        writing.add(name, "session", token=None, after_step=after_step, **who)
    version = {"first": 0, "second": 10}[session]
    for step in steps:
        for mini_batch in range(2):
            for rank, (name, who) in enumerate(zip(names, whose, strict=True)):
                writing.add(name, "received", **who, **share(step, mini_batch, rank))
        manifest = f"m{step}"
        writing.add(names[0], "updated", step=step, manifest=manifest, **whose[0])
        for kind in ("stepped", *["committed"] * (step in commits)):
            if kind == "committed":
                writing.add(names[0], "checkpoint", step=step, token="", **whose[0])
            writing.add(names[0], "waiting", what=kind, deadline_s=1.0)
            writing.add(names[0], "waited", what=kind, outcome="")
            writing.add(names[0], kind, step=step, token="", **whose[0])
        writing.add(names[0], "announced", version=version + step, step=step, **whose[0])
    weights = [f"m{step}" for step in range(1, steps[-1] + 1)]
    writing.add(names[0], "done", weights=weights, **whose[0])


def share(step: int, mini_batch: int, dp_rank: int) -> dict[str, Any]:
    """Return the share of a rank: the trajectory of each group with its number."""
    group = f"g{2 * (step - 1) + mini_batch}"
    rows = rows_of(group)
    mine = [row for row in rows if row["trajectory"] == f"{group}/{dp_rank}/0"]
    trained = sum(row["num_trained"] for row in rows)
    return {
        "step": step,
        "mini_batch": mini_batch,
        "num_mini_batches": 2,
        "manifest": f"m{step}",
        "content": f"c{step}-{mini_batch}-{dp_rank}",
        "denominators": [trained, len(rows), 2, 1, float(len(rows)), 0],
        "num_micro_batches": 1,
        "num_positions": 3,
        "rows": mine,
    }


def rows_of(group: str) -> list[dict[str, Any]]:
    said = [episode(f"{group}/{sample}/0", writer=WRITER) for sample in range(2)]
    rows: list[dict[str, Any]] = []
    for sample, each in enumerate(said):
        for sequence, name in enumerate(each.rows):
            rows.append(
                {
                    "row": 100 * int(group[1:]) + len(rows),
                    "trajectory": f"{group}/{sample}/0",
                    "sequence": sequence,
                    "name": name,
                    "num_trained": each.num_trained[sequence],
                    "reward": each.reward,
                    "advantage": each.reward - said[1 - sample].reward,
                }
            )
    return rows


def change(lines: Lines, kind: str, position: int = 0, **facts: Any) -> Lines:
    chosen = [line for line in lines if line.kind == kind][position]
    return [line.but(**facts) if line is chosen else line for line in lines]


def without(lines: Lines, kind: str, position: int = 0) -> Lines:
    chosen = [line for line in lines if line.kind == kind][position]
    return [line for line in lines if line is not chosen]


def edit_shares(
    lines: Lines, edit: Callable[[dict[str, Any]], dict[str, Any]], **where: Any
) -> Lines:
    """Return the lines with other facts in the received shares that have these facts."""
    return [
        line.but(**edit(line.facts))
        if line.kind == "received" and where.items() <= line.facts.items()
        else line
        for line in lines
    ]


def edit_row(lines: Lines, position: int = 0, **facts: Any) -> Lines:
    share = [line for line in lines if line.kind == "received"][position]
    first, *others = share["rows"]
    return change(lines, "received", position, rows=[{**first, **facts}, *others])


def renamed(lines: Lines, names: Mapping[str, str]) -> Lines:
    def told(facts: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(facts)
        for name, other in names.items():
            text = text.replace(f'"{name}"', f'"{other}"').replace(f'"{name}/', f'"{other}/')
        return json.loads(text)

    return [Line(line.process, line.kind, line.at, told(line.facts)) for line in lines]
