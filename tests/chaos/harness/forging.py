"""A correct history that no process wrote, and ways to change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness.episodes import episode
from harness.history import Line

Lines = list[Line]
Facts = dict[str, Any]

WRITER = "w"
NUM_STEPS = 4


def right_history() -> Lines:
    """Return two sessions of two ranks: the second starts after step 2 of the first one's three.

    Every step has two groups of two members, each group in a mini-batch of its own. The lines are
    a millisecond apart.
    """
    lines = [line for group in range(2 * NUM_STEPS) for line in group_lines(f"g{group}")]
    for step in range(1, NUM_STEPS + 1):
        epoch = 1 + step // 3
        facts = {"step": step, "epoch": epoch, "manifest": f"m{step}"}
        lines.append(Line(f"batcher-{epoch}", "planned", 0.0, facts))
    lines += _session_lines("first", after_step=0, steps=[1, 2, 3], commits=[2])
    lines += _session_lines("second", after_step=2, steps=[3, 4], commits=[4])
    return [replace(line, at=number / 1000) for number, line in enumerate(lines)]


def group_lines(group: str, *, at: float = 0.0) -> Lines:
    opening = {"group": group, "num_samples": 2}
    found: list[tuple[str, Facts]] = [
        ("opening", opening),
        ("waiting", {"what": "admission", "deadline_s": 1.0}),
        ("waited", {"what": "admission", "outcome": ""}),
        ("opened", opening),
    ]
    for sample in range(2):
        name = f"{group}/{sample}/0"
        own = episode(name, writer=WRITER)
        facts = {"rows": list(own.rows), "num_trained": list(own.num_trained)}
        found += [
            ("sealing", {"trajectory": name, "reward": own.reward, **facts}),
            ("sealed", {"trajectory": name}),
        ]
    found.append(("alive", {"max_rss_bytes": 1000, "held_bytes": 5, "max_held_bytes": 10}))
    return [Line("generator", kind, at, facts) for kind, facts in found]


def _session_lines(session: str, *, after_step: int, steps: list[int], commits: list[int]) -> Lines:
    lines: Lines = []

    def write(kind: str, dp_rank: int = 0, **facts: Any) -> None:
        who = {"session": session, "dp_rank": dp_rank, "dp_world_size": 2}
        lines.append(Line(f"{session}-{dp_rank}", kind, 0.0, {**who, **facts}))

    for dp_rank in range(2):
        write("session", dp_rank, token=None, after_step=after_step)
    version = {"first": 0, "second": 10}[session]
    for step in steps:
        for mini_batch in range(2):
            for dp_rank in range(2):
                write("received", dp_rank, **share(step, mini_batch, dp_rank))
        write("updated", step=step, manifest=f"m{step}")
        for kind in ("stepped", *["committed"] * (step in commits)):
            if kind == "committed":
                write("checkpoint", step=step, token="")
            write("waiting", what=kind, deadline_s=1.0)
            write("waited", what=kind, outcome="")
            write(kind, step=step, token="")
        write("announced", version=version + step, step=step)
    write("done", weights=[f"m{step}" for step in range(1, steps[-1] + 1)])
    return lines


def share(step: int, mini_batch: int, dp_rank: int) -> Facts:
    """Return the share of a rank: the member of the group with the number of the rank."""
    group = f"g{2 * (step - 1) + mini_batch}"
    rows = _rows_of(group)
    return {
        "step": step,
        "mini_batch": mini_batch,
        "num_mini_batches": 2,
        "manifest": f"m{step}",
        "content": f"c{step}-{mini_batch}-{dp_rank}",
        "denominators": [sum(row["num_trained"] for row in rows), len(rows), 2, 1, len(rows), 0],
        "num_micro_batches": 1,
        "num_positions": 3,
        "rows": [row for row in rows if row["trajectory"] == f"{group}/{dp_rank}/0"],
    }


def _rows_of(group: str) -> list[Facts]:
    members = [episode(f"{group}/{sample}/0", writer=WRITER) for sample in range(2)]
    rows: list[Facts] = []
    for sample, own in enumerate(members):
        for sequence, name in enumerate(own.rows):
            rows.append(
                {
                    "row": 100 * int(group[1:]) + len(rows),
                    "trajectory": f"{group}/{sample}/0",
                    "sequence": sequence,
                    "name": name,
                    "num_trained": own.num_trained[sequence],
                    "reward": own.reward,
                    "advantage": own.reward - members[1 - sample].reward,
                }
            )
    return rows


def change(lines: Lines, kind: str, position: int = 0, **facts: Any) -> Lines:
    chosen = [line for line in lines if line.kind == kind][position]
    return [line.but(**facts) if line is chosen else line for line in lines]


def without(lines: Lines, kind: str, position: int = 0) -> Lines:
    chosen = [line for line in lines if line.kind == kind][position]
    return [line for line in lines if line is not chosen]


def edit_shares(lines: Lines, edit: Callable[[Facts], Facts], **where: Any) -> Lines:
    """Return the lines with other facts in the received shares that have these facts."""
    return [
        line.but(**edit(line.facts))
        if line.kind == "received" and where.items() <= line.facts.items()
        else line
        for line in lines
    ]


def edit_row(lines: Lines, position: int = 0, **facts: Any) -> Lines:
    received = [line for line in lines if line.kind == "received"][position]
    first, *others = received["rows"]
    return change(lines, "received", position, rows=[{**first, **facts}, *others])
