"""The invariants I1 to I8, each a function that lists what contradicts it.

They read the history alone, which is what generators and ranks wrote down themselves, and what
batchers logged; only I1 also takes one reading of the ledger's counts. Where a kill leaves two
possibilities, both are allowed::

    what was acknowledged        must have happened
    what was attempted           may have happened
    what was never attempted     must not have happened
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.history import History, Line, Violations
from harness.invariants import (
    adopted_turns_are_those_appended,
    groups_have_their_members,
    rows_are_what_was_said,
    stale_sessions_are_refused,
    steps_are_stepped_by_all_ranks,
    steps_have_one_leader,
    versions_are_never_reused,
)

SLACK_S = 3.0
"""Allowed delay after a deadline, for a busy machine."""


class HistoryError(AssertionError):
    """The history contradicts the promise."""


def check(
    history: History,
    *,
    counts: Mapping[str, int] | None = None,
    is_drained: bool = False,
    loses_plans: bool = False,
    max_rss_bytes: int = 1 << 30,
) -> None:
    """Prove the invariants, or raise a HistoryError that names every contradiction.

    Args:
        history: history of the run.
        counts: trajectories by state, and `accepted`, read from the ledger after the last line.
        is_drained: whether the run was trained to its end, with everything that was acknowledged.
        loses_plans: whether plans were lost or withdrawn, so that a step may have several.
        max_rss_bytes: memory limit of every process.
    """
    checks = [*CHECKS, *([nothing_is_lost] if is_drained else [])]
    if history.cuts:
        checks = [each for each in checks if each not in OF_ONE_BRANCH]
    if loses_plans:
        checks = [each for each in checks if each is not steps_have_one_leader]
    found = [f"{check.__name__}: {text}" for check in checks for text in check(history)]
    found += [f"bounds_hold: {text}" for text in bounds_hold(history, max_rss_bytes=max_rss_bytes)]
    if counts is not None:
        found += [f"ledger_adds_up: {text}" for text in ledger_adds_up(history, counts)]
    if found:
        shown = "\n  ".join(found[:20])
        raise HistoryError(f"{len(found)} contradictions\n  {shown}")


def ledger_adds_up(history: History, counts: Mapping[str, int]) -> Violations:
    """I1: accepted trajectories are each in one state, and the states are those of the history."""
    states = {name: count for name, count in counts.items() if name != "accepted"}
    accepted = counts["accepted"]
    if sum(states.values()) != accepted:
        yield f"{accepted} are accepted, but the states add up to {sum(states.values())}"
    acknowledged, tried = _accepted(history)
    if not acknowledged <= accepted <= tried:
        yield f"{accepted} are accepted, but {acknowledged} were acknowledged and {tried} tried"
    ended = accepted - states.get("open", 0) - states.get("abandoned", 0)
    sealed = ended - states.get("surplus", 0)  # which an open trajectory may be
    sure = len(history.acknowledged - history.excused)
    if not sure <= ended or not sealed <= len(history.seals):
        yield (
            f"{ended} are sealed or further, but {len(history.acknowledged)} seals were "
            f"acknowledged and {len(history.seals)} were tried"
        )
    yield from _frontier_adds_up(history, states)


def _accepted(history: History) -> tuple[int, int]:
    """Return the number of acknowledged trajectories, and the number of attempted ones."""
    acknowledged = {
        f"{line['group']}/{sample}/0"
        for line in history.of("opened")
        for sample in range(line["num_samples"])
    }
    acknowledged |= {line["trajectory"] for line in history.of("granted")}
    tried = sum(line["num_samples"] for line in history.of("opening"))
    tried += sum(1 for _ in history.of("asking")) - sum(1 for _ in history.of("no_refill"))
    return len(acknowledged - history.lost), tried


def _frontier_adds_up(history: History, states: Mapping[str, int]) -> Violations:
    """Committed, and stepped beyond it, are as many as the ranks have trained."""
    committed = states.get("committed", 0)
    trained = committed + states.get("stepped", 0)
    stepped, tried = _newest(history, "stepped"), _newest(history, "updated")
    if (
        not _num_trained_through(history, stepped)
        <= trained
        <= _num_trained_through(history, tried)
    ):
        yield f"{trained} are stepped, but the ranks have stepped {stepped} and updated {tried}"
    sure, maybe = _newest(history, "committed"), _newest(history, "checkpoint")
    if not _num_trained_through(history, sure) <= committed <= _num_trained_through(history, maybe):
        yield f"{committed} are committed, but the ranks committed step {sure} and wrote {maybe}"


def _newest(history: History, kind: str) -> int:
    """The newest surviving step of a kind of line, a session's own start included."""
    steps = [session.after_step for session in history.sessions[-1:]]
    steps += [line["step"] for line in history.of(kind) if history.survives(line)]
    return max(steps, default=0)


def _num_trained_through(history: History, last_step: int) -> int:
    rows = history.surviving_rows
    return len({(step, row["trajectory"]) for step, row in rows if step <= last_step})


def trained_once(history: History) -> Violations:
    """I2: the surviving steps have no trajectory in two batches, and no row twice."""
    step_of: dict[str, int] = {}
    row_ids: set[tuple[int, int]] = set()
    for step, row in history.surviving_rows:
        if (step, row["row"]) in row_ids:
            yield f"row {row['row']} is twice in step {step}"
        row_ids.add((step, row["row"]))
        if step_of.setdefault(row["trajectory"], step) != step:
            yield f"{row['trajectory']} is in step {step_of[row['trajectory']]} and {step}"


def weights_hold_each_step_once(history: History) -> Violations:
    """I2 and I3 again, from the weights: they were made of the surviving steps, in order."""
    manifests = {
        (line["session"], line["step"]): line["manifest"] for line in history.of("updated")
    }
    for line in history.of("done"):
        if "weights" not in line.facts:  # a generator's
            continue
        if not history.sessions or line["session"] != history.sessions[-1].name:
            continue
        expected = [manifests[session, step] for step, session in sorted(history.surviving.items())]
        if line["weights"] != expected:
            yield f"{line.process} has weights of {line['weights']}, expected were {expected}"


def restarts_return_what_followed(history: History) -> Violations:
    """I3: a session gets the steps after its token in order, the same as in earlier sessions."""
    begins = {session.name: session.after_step for session in history.sessions}
    last: dict[tuple[str, int], tuple[int, int, int]] = {}
    for line in history.of("received"):
        key = line["session"], line["dp_rank"]
        if line["session"] not in begins:
            yield f"{line.process} received step {line['step']} before its session began"
            continue
        step, mini_batch, num = last.get(key, (begins[line["session"]], 0, 1))
        due = (step, mini_batch + 1) if mini_batch + 1 < num else (step + 1, 0)
        if (line["step"], line["mini_batch"]) != due:
            yield f"{line.process} got {line['step'], line['mini_batch']}, due was {due}"
        last[key] = line["step"], line["mini_batch"], line["num_mini_batches"]
    yield from _repetitions_differ(history)


def _repetitions_differ(history: History) -> Violations:
    whole: dict[tuple[int, int], tuple[Line, Any]] = {}
    share: dict[tuple[int, int, int, int], Line] = {}
    for name, lines in history.complete_mini_batches():
        rows = sorted(
            (tuple(sorted(row.items())) for line in lines for row in line["rows"]),
            key=lambda row: dict(row)["row"],
        )
        key = name.step, name.mini_batch
        said = (lines[0]["manifest"], lines[0]["denominators"], rows)
        before = whole.setdefault(key, (lines[0], said))
        if before[1] != said:
            yield f"step {key} differs in sessions {before[0]['session']} and {name.session}"
    for line in history.of("received"):
        key = line["step"], line["mini_batch"], line["dp_rank"], line["dp_world_size"]
        before = share.setdefault(key, line)
        if before["content"] != line["content"]:
            sessions = f"{before['session']} and {line['session']}"
            yield f"the share {key} differs in sessions {sessions}"


def groups_stay_whole(history: History) -> Violations:
    """I4: a group is in one mini-batch, with baselines from its trained members."""
    place: dict[str, tuple[int, int]] = {}
    for name, lines in history.complete_mini_batches():
        members: dict[str, dict[str, dict[str, Any]]] = {}
        for row in itertools.chain.from_iterable(line["rows"] for line in lines):
            members.setdefault(_group(row["trajectory"]), {})[row["trajectory"]] = row
        for group, rows in members.items():
            here = name.step, name.mini_batch
            before = place.setdefault(group, here)
            if before != here:
                yield f"group {group} is in {before} and in {here}"
            is_centered = name.step >= history.centered_from
            yield from _wrong_advantages(group, list(rows.values()), is_centered=is_centered)


def _group(trajectory: str) -> str:
    return trajectory.split("/")[0]


def _wrong_advantages(
    group: str, rows: Sequence[dict[str, Any]], *, is_centered: bool
) -> Violations:
    total = math.fsum(row["reward"] for row in rows)
    for row in rows:
        others = (total - row["reward"]) / (len(rows) - 1) if len(rows) > 1 else row["reward"]
        baseline = total / len(rows) if is_centered else others
        if not math.isclose(row["advantage"], row["reward"] - baseline, abs_tol=1e-5):
            yield f"{row['trajectory']} of {group} has the advantage {row['advantage']}"


def ranks_share_one_manifest(history: History) -> Violations:
    """I5: all ranks see one manifest, disjoint rows, and equally many passes and positions."""
    for name, lines in history.received.items():
        for fact in ("manifest", "num_mini_batches", "num_micro_batches", "num_positions"):
            if len({line[fact] for line in lines}) > 1:
                yield f"{name}: the ranks have several values of {fact}"
        if len({line["dp_rank"] for line in lines}) < len(lines):
            yield f"{name}: a rank received it twice"
        row_ids = [row["row"] for line in lines for row in line["rows"]]
        if len(set(row_ids)) < len(row_ids):
            yield f"{name}: ranks share rows"
    for name, lines in history.complete_mini_batches():
        row_ids = sorted(row["row"] for line in lines for row in line["rows"])
        if row_ids and row_ids != list(range(row_ids[0], row_ids[-1] + 1)):
            yield f"{name}: rows are missing among {row_ids}"


def denominators_are_of_the_rows(history: History) -> Violations:
    """I6: the shipped denominators are what the rows of all ranks add up to."""
    for name, lines in history.complete_mini_batches():
        live = [row for line in lines for row in line["rows"] if row["num_trained"]]
        counted = [
            sum(row["num_trained"] for row in live),
            len(live),
            len({row["trajectory"] for row in live}),
            len({_group(row["trajectory"]) for row in live}),
            float(len(live)),
            0,
        ]
        for line in lines:
            if line["denominators"] != counted:
                yield f"{name}: shipped {line['denominators']}, counted {counted}"


def waits_end(history: History) -> Violations:
    """I7: every wait ended by its deadline; time in which the process could not run is not its."""
    for process, lines in history.by_process.items():
        pauses = [(line["since"], line["until"]) for line in lines if line.kind == "paused"]
        begun: Line | None = None
        for line in lines:
            if line.kind == "waiting":
                if begun is not None:
                    yield f"{process}: a wait for {begun['what']} has no end"
                begun = line
            elif line.kind == "waited" and begun is not None:
                yield from _late(begun, until=line.at, pauses=pauses)
                begun = None
        if begun is not None:  # killed in it: its wait ends with its last line
            yield from _late(begun, until=lines[-1].at, pauses=pauses)


def _late(begun: Line, *, until: float, pauses: Sequence[tuple[float, float]]) -> Violations:
    asleep_s = math.fsum(max(0.0, min(until, end) - max(begun.at, start)) for start, end in pauses)
    lasted_s = until - begun.at - asleep_s
    if lasted_s > begun["deadline_s"] + SLACK_S:
        yield (
            f"{begun.process}: a wait for {begun['what']} of {begun['deadline_s']:.1f} s "
            f"lasted {lasted_s:.1f} s"
        )


def bounds_hold(history: History, *, max_rss_bytes: int) -> Violations:
    """I8: no process held more than it may."""
    for line in history.of("alive"):
        if line["max_rss_bytes"] > max_rss_bytes:
            yield f"{line.process} had {line['max_rss_bytes']} bytes of memory"
        if line.facts.get("held_bytes", 0) > line.facts.get("max_held_bytes", 0):
            yield f"{line.process} held {line['held_bytes']} of {line['max_held_bytes']} bytes"


def nothing_is_lost(history: History) -> Violations:
    """P1, for a run that was trained to its end: groups that were sealed whole were trained."""
    trained = {row["trajectory"] for _, row in history.surviving_rows}
    for group, members in sorted(history.acknowledged_by_group.items()):
        if members & history.lost:
            continue  # a group without a member may end untrained
        lost = members - trained - history.excused
        if len(members) == history.members.get(group) and lost:
            yield f"{', '.join(sorted(lost))} were acknowledged and never trained"


CHECKS: tuple[Callable[[History], Violations], ...] = (
    trained_once,
    weights_hold_each_step_once,
    restarts_return_what_followed,
    groups_stay_whole,
    ranks_share_one_manifest,
    denominators_are_of_the_rows,
    waits_end,
    rows_are_what_was_said,
    versions_are_never_reused,
    stale_sessions_are_refused,
    steps_have_one_leader,
    groups_have_their_members,
    adopted_turns_are_those_appended,
    steps_are_stepped_by_all_ranks,
)

OF_ONE_BRANCH = (
    versions_are_never_reused,
    steps_have_one_leader,
)
"""Invariants of a store that loses nothing. Others read the branch that survives a loss."""
