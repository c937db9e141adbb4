"""Invariants of members, turns, leaders, versions and sessions."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.episodes import sampled
from harness.history import History, Line, MiniBatchName, Violations


def groups_have_their_members(history: History) -> Violations:
    """I4: a trained group has each member that it was opened with, once, except excused ones."""
    for name, rows in _trained(history):
        attempts: dict[str, dict[int, set[str]]] = {}
        for trajectory in rows:
            group, sample, _ = trajectory.split("/")
            attempts.setdefault(group, {}).setdefault(int(sample), set()).add(trajectory)
        for group, by_sample in attempts.items():
            if group not in history.members:
                yield f"{name}: group {group} was never opened"
            for sample, tried in by_sample.items():
                if len(tried) > 1:
                    yield f"{name}: sample {sample} of {group} is trained as {sorted(tried)}"
            for sample in range(history.members.get(group, 0)):
                own = f"{group}/{sample}/"
                is_excused = any(each.startswith(own) for each in history.excused)
                if sample not in by_sample and not is_excused:
                    yield f"{name}: {group} is trained without its sample {sample}"


def rows_are_what_was_said(history: History) -> Violations:
    """P1: each trained trajectory is one sealed episode of one writer, token by token.

    If several writers sealed it, the acknowledged seal counts.
    """
    told: dict[str, set[str]] = {}
    for line in history.of("sealed"):
        told.setdefault(line["trajectory"], set()).add(line.process)
    for name, rows in _trained(history):
        for trajectory, found in rows.items():
            ordered = sorted(found, key=lambda row: row["sequence"])
            got = (
                [row["name"] for row in ordered],
                [row["num_trained"] for row in ordered],
                ordered[0]["reward"],
            )
            seals = history.seals.get(trajectory, [])
            counted = [seal for seal in seals if seal.process in told.get(trajectory, ())]
            said = [
                (list(seal["rows"]), list(seal["num_trained"]), seal["reward"])
                for seal in counted or seals
            ]
            if got not in said:
                yield f"{name}: {trajectory} is {got}, its writers sealed {said}"


def adopted_turns_are_those_appended(history: History) -> Violations:
    """P1: an adopting generator finds every acknowledged turn, each as a generator wrote it.

    A store that has lost its newest data may have fewer turns.
    """
    known: dict[str, int] = {}
    writers: dict[tuple[str, int], list[str]] = {}
    for line in history.of("appending", "appended", "adopted"):
        name = line["trajectory"]
        if line.kind == "appending":
            turn = name, line["turn"]
            writers.setdefault(turn, []).append(line.process.removeprefix("generator-"))
        elif line.kind == "appended":
            known[name] = max(known.get(name, 0), line["turn"] + 1)
        else:
            num_turns = 0 if history.cuts else known.get(name, 0)
            if line["num_turns"] < num_turns:
                yield f"{line.process} found {line['num_turns']} turns of {name}, not {num_turns}"
            for index, found in enumerate(line.facts.get("sampled", ())):
                said = [
                    sampled(name, writer=writer, index=index).tolist()
                    for writer in writers.get((name, index), ())
                ]
                if found not in said:
                    yield f"{line.process} found {found} in turn {index} of {name}, not {said}"
    for name in known:
        if not history.cuts and name.split("/")[0] not in history.members:
            yield f"turns of {name} were acknowledged, and its group was never opened"


def steps_are_stepped_by_all_ranks(history: History) -> Violations:
    """I5: a step that was acknowledged was delivered whole, to every rank, from one manifest."""
    received: dict[tuple[str, int], list[Line]] = {}
    for line in history.of("received"):
        received.setdefault((line["session"], line["step"]), []).append(line)
    updated = {(line["session"], line["step"]): line["manifest"] for line in history.of("updated")}
    for line in history.of("stepped"):
        key = line["session"], line["step"]
        shares = received.get(key, [])
        manifests = {share["manifest"] for share in shares} | {updated.get(key, "")}
        if len(manifests) > 1:
            yield f"step {key[1]} of {key[0]} was stepped from {sorted(manifests)}"
        came = {(share["dp_rank"], share["mini_batch"]) for share in shares}
        for share in shares[:1]:
            due = itertools.product(range(share["dp_world_size"]), range(share["num_mini_batches"]))
            if missing := sorted(set(due) - came):
                yield f"step {key[1]} of {key[0]} was stepped without (rank, mini-batch) {missing}"


def _trained(history: History) -> Iterator[tuple[MiniBatchName, dict[str, list[dict[str, Any]]]]]:
    """Trajectory -> its rows, of every mini-batch that all ranks have."""
    for name, lines in history.complete_mini_batches():
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in itertools.chain.from_iterable(line["rows"] for line in lines):
            rows.setdefault(row["trajectory"], []).append(row)
        yield name, rows


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
    if history.received and not any(history.of("planned")):
        yield "ranks received steps, and no batcher logged a plan"
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
