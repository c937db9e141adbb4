"""All logs of a run as one history, and what of it survives the restarts."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

Violations = Iterator[str]
"""Sentences about what contradicts an invariant."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a log; `at` is a time of the machine's monotonic clock, in seconds."""

    process: str
    kind: str
    at: float
    facts: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.facts[name]

    def but(self, **facts: Any) -> Line:
        """The same line with other facts."""
        return replace(self, facts={**self.facts, **facts})


class Logs:
    """The logs of a folder, without a last line that a kill has cut short.

    Each byte is read once, because tests look at the history many times a second.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._lines: list[Line] = []
        self._counts: Counter[str] = Counter()

    def lines(self) -> Sequence[Line]:
        """All lines so far, those of a process in their order."""
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as log:
                log.seek(self._read.get(path, 0))
                whole, newline, _ = log.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole + newline)
            for text in whole.splitlines():
                facts = json.loads(text)
                self._lines.append(Line(path.stem, facts.pop("kind"), facts.pop("at"), facts))
                self._counts[self._lines[-1].kind] += 1
        return self._lines

    def count(self, kind: str) -> int:
        """Return the number of lines of a kind so far."""
        self.lines()
        return self._counts[kind]


class MiniBatchName(NamedTuple):
    """Which mini-batch of which step, in which session."""

    session: str
    step: int
    mini_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One start of a trainer, after the step of its token; `updated` are its optimizer steps."""

    name: str
    after_step: int
    dp_world_size: int
    updated: tuple[int, ...]


class History:
    """Lines of any processes, in any order.

    Args:
        lines: lines of the logs.
        excused: trajectories that need not be trained though they were acknowledged, because a
            test has damaged them or the run's policy drops them.
        cuts: times at which the store lost its newest data, so that steps may be planned twice.
        lost: trajectories that these cuts may have taken; see harness.losses.
        centered_from: first step whose baseline is the mean of the group, also of the row itself.
    """

    def __init__(
        self,
        lines: Iterable[Line],
        *,
        excused: Collection[str] = (),
        cuts: Sequence[float] = (),
        lost: Collection[str] = (),
        centered_from: int = sys.maxsize,
    ) -> None:
        self.lines = tuple(sorted(lines, key=lambda line: line.at))
        self.excused = frozenset({*excused, *lost})
        self.cuts = tuple(cuts)
        self.lost = frozenset(lost)
        self.centered_from = centered_from
        if cuts:  # only the branch in the final weights has one plan for every step
            self.lines = tuple(
                line for line in self.lines if line.kind != "received" or self.survives(line)
            )

    def survives(self, line: Line) -> bool:
        """Whether the final weights have the step of this line from its session."""
        return self.surviving.get(line["step"]) == line["session"]

    def of(self, *kinds: str) -> Iterator[Line]:
        """The lines of these kinds, in order of time."""
        return (line for line in self.lines if line.kind in kinds)

    @cached_property
    def by_process(self) -> dict[str, list[Line]]:
        """The lines of every process."""
        found: dict[str, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.process, []).append(line)
        return found

    @cached_property
    def seals(self) -> dict[str, list[Line]]:
        """Trajectory -> what its writers said in their seals; more than one where they fought."""
        found: dict[str, list[Line]] = {}
        for line in self.of("sealing"):
            found.setdefault(line["trajectory"], []).append(line)
        return found

    @cached_property
    def members(self) -> dict[str, int]:
        """Return the number of members of each opened group."""
        return {line["group"]: line["num_samples"] for line in self.of("opening")}

    @cached_property
    def acknowledged(self) -> set[str]:
        """The trajectories of which a generator was told that the run knows their seal."""
        return {line["trajectory"] for line in self.of("sealed")}

    @cached_property
    def acknowledged_by_group(self) -> dict[str, set[str]]:
        """The same, by group."""
        found: dict[str, set[str]] = {}
        for trajectory in self.acknowledged:
            found.setdefault(trajectory.split("/")[0], set()).add(trajectory)
        return found

    @cached_property
    def received(self) -> dict[MiniBatchName, list[Line]]:
        """Return the shares of the ranks, by mini-batch."""
        found: dict[MiniBatchName, list[Line]] = {}
        for line in self.of("received"):
            name = MiniBatchName(line["session"], line["step"], line["mini_batch"])
            found.setdefault(name, []).append(line)
        return found

    @cached_property
    def sessions(self) -> list[Session]:
        """Starts of a trainer, in order of their first rank's."""
        updated: dict[str, list[int]] = {}
        for line in self.of("updated"):
            updated.setdefault(line["session"], []).append(line["step"])
        found: dict[str, Session] = {}
        for line in self.of("session"):
            name = line["session"]
            found.setdefault(
                name,
                Session(
                    name=name,
                    after_step=line["after_step"],
                    dp_world_size=line["dp_world_size"],
                    updated=tuple(updated.get(name, ())),
                ),
            )
        return list(found.values())

    @cached_property
    def surviving(self) -> dict[int, str]:
        """Return the session that trained each step into the final weights.

        The weights of a session that starts after step c contain no later step of an earlier
        session::

            first trains 1 2 3, second begins after 2 and trains 3 4   ->   1 2 first, 3 4 second

        A session may also start from a checkpoint of an abandoned branch, with the steps of that
        branch.
        """
        steps: dict[str, dict[int, str]] = {"": {}}
        saved: dict[str, dict[int, str]] = {}
        newest = ""
        for line in self.of("session", "updated", "checkpoint"):
            name, begins = line["session"], line["session"] not in steps
            if begins:
                before = saved.get(line["token"] or "", steps[newest])
                steps[name] = {s: by for s, by in before.items() if s <= line["after_step"]}
                newest = name
            if line.kind == "updated":
                steps[name][line["step"]] = name
            elif line.kind == "checkpoint":
                saved[line["token"]] = dict(steps[name])
        return steps[newest]

    def rows(self, *, session: str, step: int) -> list[dict[str, Any]]:
        """Every real row of a step as the ranks of a session got it."""
        return self._rows_by_step.get((session, step), [])

    @cached_property
    def surviving_rows(self) -> list[tuple[int, dict[str, Any]]]:
        """Return every surviving step with each of its rows, in order of the steps."""
        return [
            (step, row)
            for step, session in sorted(self.surviving.items())
            for row in self.rows(session=session, step=step)
        ]

    @cached_property
    def _rows_by_step(self) -> dict[tuple[str, int], list[dict[str, Any]]]:
        found: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for line in self.of("received"):
            found.setdefault((line["session"], line["step"]), []).extend(line["rows"])
        return found

    def complete_mini_batches(self) -> Iterator[tuple[MiniBatchName, list[Line]]]:
        """The mini-batches that all ranks of their session have received."""
        for name, lines in self.received.items():
            if len({line["dp_rank"] for line in lines}) == lines[0]["dp_world_size"]:
                yield name, lines
