"""Losses of power cuts under everysec, and the causes of refusals.

A store under everysec loses its last seconds. A publisher that lives resends them, or names what it
cannot resend::

    sealed | cut within 5 s | its generator lives for 15 s -> sealed again, or named as lost
    sealed | cut within 5 s | its generator dies           -> may be lost
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from harness.history import History, Line, Violations
from turnstream.store.client import keys

LOSS_S = 5.0
"""The loss window: older writes are on the disk. Publishers keep their writes for as long."""

RESENT_S = 15.0
"""A publisher that lives for so long after a cut has resent all that it kept."""

_NAMED = re.compile(
    r"^run \S+: (?P<name>[^/ ]+/\d+/\d+)\b.*(the store lost it|the store came back without)",
    re.MULTILINE,
)


def lost_trajectories(lines: Sequence[Line], cuts: Sequence[float], *, logs: Path) -> set[str]:
    """Return the trajectories that may be lost; `logs` has the error output of generators."""
    found = _named_losses(logs)
    by_process = History(lines).by_process
    unsure: dict[str, set[str]] = {}
    previous = -RESENT_S
    for cut in cuts:
        if cut - previous >= RESENT_S:
            unsure.clear()  # otherwise a resend may be lost again
        previous = cut
        survivors: set[str] = set()
        for process, own in by_process.items():
            for name in _written(line for line in own if cut - LOSS_S < line.at < cut):
                unsure.setdefault(name, set()).add(process)
            ended_well = any(line.kind == "done" and line.at > cut for line in own)
            if ended_well or own[-1].at > cut + RESENT_S:
                survivors.add(process)
        found |= {name for name, writers in unsure.items() if not writers & survivors}
    return found


def _written(lines: Iterable[Line]) -> Iterator[str]:
    for line in lines:
        if line.kind in ("sealing", "sealed"):
            yield line["trajectory"]
        elif line.kind in ("opening", "opened"):
            yield from (f"{line['group']}/{sample}/0" for sample in range(line["num_samples"]))


def _named_losses(logs: Path) -> set[str]:
    found: set[str] = set()
    for path in logs.glob("generator-*.log"):
        for match in _NAMED.finditer(path.read_text(encoding="utf-8", errors="replace")):
            group, _, rest = match["name"].partition("/")
            found.add(f"{group if '%' in group else keys.encode_name(group)}/{rest}")
    return found


NAMED = ("ConflictError", "FencedError", "StoreBehindError")
"""Errors for a generator that lost a trajectory."""

AFTER_CUT_S = 30.0
"""By when after a cut its losses are named."""


def refusals_have_a_cause(history: History) -> Violations:
    """A refused trajectory was adopted by another process, or a cut took it."""
    takers: dict[str, set[str]] = {}
    for line in history.of("adopted"):
        takers.setdefault(line["trajectory"], set()).add(line.process)
    for line in history.of("refused"):
        if not line.process.startswith("generator-") or line["error"] == "EndOfRunError":
            continue
        name = line.facts.get("trajectory", line.facts.get("group", ""))
        is_taken = bool(takers.get(name, set()) - {line.process})
        is_after_cut = any(0 < line.at - cut < AFTER_CUT_S for cut in history.cuts)
        if not (line["error"].startswith(NAMED) and (is_taken or is_after_cut)):
            yield f"{line.process} was refused {name or 'something'}: {line['error']}"
