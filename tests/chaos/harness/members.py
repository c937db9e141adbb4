"""Invariants of the trained members of groups and of their turns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from harness.episodes import sampled
from harness.history import History, Line, MiniBatchName

Violations = Iterator[str]


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
                if sample not in by_sample and not _is_excused(history, group, sample):
                    yield f"{name}: {group} is trained without its sample {sample}"


def _is_excused(history: History, group: str, sample: int) -> bool:
    return any(name.startswith(f"{group}/{sample}/") for name in history.excused)


def rows_are_what_was_said(history: History) -> Violations:
    """P1: each trained trajectory is one sealed episode of one writer, token by token.

    If several writers sealed it, the acknowledged seal counts. A reward that was posted later is
    not part of the seal; see harness.rewards.
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
                None if trajectory in history.awaiting else ordered[0]["reward"],
            )
            seals = history.seals.get(trajectory, [])
            counted = [seal for seal in seals if seal.process in told.get(trajectory, ())]
            said = [
                (list(seal["rows"]), list(seal["num_trained"]), seal["reward"])
                for seal in counted or seals
            ]
            if got not in said:
                yield f"{name}: {trajectory} is {got}, its writers sealed {said}"


def acknowledged_turns_are_kept(history: History) -> Violations:
    """P1: an adopting generator finds every turn that was acknowledged before."""
    appended: dict[str, list[Line]] = {}
    for line in history.of("appended", "taken"):
        trajectory = line["trajectory"]
        if line.kind == "appended":
            appended.setdefault(trajectory, []).append(line)
            continue
        known = max((each["turn"] + 1 for each in appended.get(trajectory, ())), default=0)
        if line["num_turns"] < known:
            yield f"{line.process} found {line['num_turns']} turns of {trajectory}, not {known}"
    for trajectory in appended:
        if trajectory.split("/")[0] not in history.members:
            yield f"turns of {trajectory} were acknowledged, and its group was never opened"


def takers_find_what_was_said(history: History) -> Violations:
    """Each turn that is found of a trajectory is what a generator before said in that turn."""
    writers: dict[tuple[str, int], list[str]] = {}
    for line in history.of("appending", "taken"):
        trajectory = line["trajectory"]
        if line.kind == "appending":
            turn = trajectory, line["turn"]
            writers.setdefault(turn, []).append(line.process.removeprefix("generator-"))
            continue
        for index, found in enumerate(line.facts.get("sampled", ())):
            said = [
                sampled(trajectory, writer=writer, index=index).tolist()
                for writer in writers.get((trajectory, index), ())
            ]
            if found not in said:
                yield f"{line.process} found {found} in turn {index} of {trajectory}, not {said}"


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
