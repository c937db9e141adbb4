"""Invariants of leaders, policy versions, trainer sessions and observers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from harness.history import History, Line

_PLANNED = re.compile(
    r"^(?P<time>[-\d]+ [:\d]+),(?P<ms>\d+) .* planned step (?P<step>\d+) of run (?P<run>\S+) .*"
    r"\bmanifest_hash=(?P<manifest>\w+) leader_epoch=(?P<epoch>\d+)$"
)


def read_plans(folder: Path, *, run: str) -> list[Line]:
    """A line "planned" for every plan that a batcher was told is written.

    Its time is right where the batcher's clock is.

    A batcher that is killed between the writing and its note leaves none.
    """
    found: list[Line] = []
    for path in sorted(folder.glob("*.log")):
        whole, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        for text in whole.splitlines():
            plan = _PLANNED.search(text)
            if plan is not None and plan["run"] == run:
                facts = {"step": int(plan["step"]), "epoch": int(plan["epoch"])}
                facts |= {"manifest": plan["manifest"]}
                found.append(Line(path.stem, "planned", _monotonic_s(plan), facts))
    return found


def _monotonic_s(plan: re.Match[str]) -> float:
    """When a line was written, by the clock that the processes of the harness go by."""
    wall_s = time.mktime(time.strptime(plan["time"], "%Y-%m-%d %H:%M:%S")) + int(plan["ms"]) / 1e3
    return wall_s - (time.time() - time.monotonic())


def steps_have_one_leader(history: History) -> Iterator[str]:
    """I2 and I5: a step was written once, by the only leader of its epoch."""
    leaders: dict[int, str] = {}
    written: dict[int, Line] = {}
    for line in history.of("planned"):
        step, epoch = line["step"], line["epoch"]
        if leaders.setdefault(epoch, line.process) != line.process:
            yield f"epoch {epoch} was of {leaders[epoch]} and of {line.process}"
        before = written.setdefault(step, line)
        if before is not line:
            yield f"step {step} was written in the epochs {before['epoch']} and {epoch}"
    epochs = [written[step]["epoch"] for step in sorted(written)]
    if epochs != sorted(epochs):
        yield f"steps were written by older leaders than the steps before: epochs {epochs}"
    for line in history.of("received"):
        planned = written.get(line["step"])
        if planned is not None and planned["manifest"] != line["manifest"]:
            yield f"{line.process} got step {line['step']} by a plan that its leader did not write"


def versions_are_never_reused(history: History) -> Iterator[str]:
    """A version names one set of weights, also after a rollback, and they only grow."""
    before = -1
    for line in history.of("announced"):
        if line["version"] <= before:
            yield f"version {line['version']} was announced after {before}"
        before = max(before, line["version"])


def stale_sessions_are_refused(history: History) -> Iterator[str]:
    """No call of an older session succeeds if it started after a newer session had started."""
    order = {session.name: number for number, session in enumerate(history.sessions)}
    began = {}
    for line in history.of("session"):
        began.setdefault(line["session"], line.at)
    asked: dict[str, Line] = {}
    for line in history.of("waiting", "stepped", "committed"):
        if line.kind == "waiting":
            asked[line.process] = line
            continue
        newer = [name for name in began if order[name] > order[line["session"]]]
        if any(began[name] < asked[line.process].at for name in newer):
            yield f"{line.process}: {line.kind} of step {line['step']} came after {newer}"


Violations = Iterator[str]


def observers_go_on_where_they_were(history: History) -> Violations:
    """Steps come in order, and a restarted observer continues after its last acknowledged step."""
    sure, tried, due = 0, 0, (1, 0)
    for line in history.of("observing", "observed", "seeing", "seen"):
        if line.kind == "seeing":
            tried = max(tried, line["step"])
        elif line.kind == "seen":
            sure = line["step"]
        elif line.kind == "observing":
            if line["missed"]:
                yield f"{line.process} missed {line['missed']} steps"
            due = (0, 0)
        else:
            here = line["step"], line["mini_batch"]
            begins = due == (0, 0) and sure < here[0] <= tried + 1 and here[1] == 0
            if here != due and not begins:
                yield f"{line.process} observed {here}, due was {due} behind the step {sure}"
            is_last = here[1] + 1 == line["num_mini_batches"]
            due = (here[0] + 1, 0) if is_last else (here[0], here[1] + 1)


def observers_see_what_is_trained(history: History) -> Violations:
    """A step is observed as the ranks had it, from the same manifest, and alike each time."""
    received: dict[int, list[Line]] = {}
    for line in history.of("received"):
        received.setdefault(line["step"], []).append(line)
    contents: dict[tuple[str, int], str] = {}
    for line in history.of("observed"):
        for other in received.get(line["step"], ()):
            if line["manifest"] != other["manifest"]:
                yield (
                    f"step {line['step']} was observed as {line['manifest']}, "
                    f"{other.process} had {other['manifest']}"
                )
        name = line["manifest"], line["mini_batch"]
        if contents.setdefault(name, line["content"]) != line["content"]:
            yield f"the mini-batch {name} of step {line['step']} was observed with two contents"


def everything_was_observed(history: History) -> Violations:
    """An observer that came to the end of the run received each surviving step."""
    if not any(True for _ in history.of("observing")):
        return
    if not any(True for _ in history.of("observed_all")):
        yield "no observer came to the end of the run"
    seen: dict[int, list[Line]] = {}
    for line in history.of("observed"):
        seen.setdefault(line["step"], []).append(line)
    for line in history.of("updated"):
        if not history.survives(line):
            continue
        found = seen.get(line["step"], [])
        if not any(each["manifest"] == line["manifest"] for each in found):
            yield f"step {line['step']} was trained and never observed"
