"""Invariants of leaders, policy versions and trainer sessions."""

from __future__ import annotations

import re
import time
from pathlib import Path

from harness.history import History, Line, Violations

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


def steps_have_one_leader(history: History) -> Violations:
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


def versions_are_never_reused(history: History) -> Violations:
    """A version names one set of weights, also after a rollback, and they only grow."""
    before = -1
    for line in history.of("announced"):
        if line["version"] <= before:
            yield f"version {line['version']} was announced after {before}"
        before = max(before, line["version"])


def stale_sessions_are_refused(history: History) -> Violations:
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
