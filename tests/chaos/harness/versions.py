"""Invariants of policy versions and of trainer sessions."""

from __future__ import annotations

from collections.abc import Iterator

from harness.history import History, Line

Violations = Iterator[str]


def versions_are_never_reused(history: History) -> Violations:
    """A version names one set of weights, also after a rollback, and they only grow.

    An announcement that the store lost may be repeated for other weights.
    """
    before, losses = -1, list(history.losses)
    asked: dict[str, float] = {}
    for line in history.of("announcing", "announced"):
        if line.kind == "announcing":
            asked[line.process] = line.at
            continue
        while losses and line.at > losses[0].at:
            before = min(before, losses.pop(0).newest_version)
        if line["version"] <= before:
            yield f"version {line['version']} was announced after {before}"
        is_sure = not any(
            asked.get(line.process, line.at) < loss.at < line.at for loss in history.losses
        )
        if is_sure:
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
