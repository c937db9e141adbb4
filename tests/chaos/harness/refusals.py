"""Invariants of the errors that generators and posters get in a long run."""

from __future__ import annotations

from collections.abc import Iterator

from harness.history import History, Line

Violations = Iterator[str]

NAMED = ("ConflictError", "FencedError", "StoreBehindError")
"""Errors for a generator that lost a trajectory."""

AFTER_CUT_S = 30.0
"""By when after a cut its losses are named."""

_OTHER_REWARD = "another reward was posted"


def refusals_have_a_cause(history: History) -> Violations:
    """A refused trajectory was adopted or rewarded by another process, or a cut took it."""
    takers: dict[str, set[str]] = {}
    for line in history.of("taken"):
        takers.setdefault(line["trajectory"], set()).add(line.process)
    for line in history.of("refused"):
        if not line.process.startswith(("generator-", "poster-")):
            continue
        name = line.facts.get("trajectory", line.facts.get("group", ""))
        is_taken = bool(takers.get(name, set()) - {line.process})
        is_after_cut = any(0 < line.at - cut < AFTER_CUT_S for cut in history.cuts)
        if not (_is_of_the_end(line) or (_is_named(line) and (is_taken or is_after_cut))):
            yield f"{line.process} was refused {name or 'something'}: {line['error']}"


def _is_of_the_end(line: Line) -> bool:
    """Whether it is none: the run has ended, or a reward is there already."""
    is_second = line.process.startswith("poster-") and _OTHER_REWARD in line["error"]
    return line["error"] == "EndOfRunError" or is_second


def _is_named(line: Line) -> bool:
    return line["error"].startswith(NAMED)
