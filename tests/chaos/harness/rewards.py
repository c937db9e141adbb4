"""Rewards that come after the seal, from another process: which of them is trained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from harness.history import History

Violations = Iterator[str]

TAKEN = ("POSTED", "DUPLICATE")
"""Outcomes of a reward that counts."""


def awaited_rewards_are_those_posted(history: History) -> Violations:
    """A reward that was acknowledged in time is the one that was trained; one told late is not."""
    taken = rewards_taken(history)
    trained = _trained(history)
    for name, rewards in taken.items():
        if name in history.lost:
            continue
        if len(rewards) > 1:
            yield f"{name} was given the rewards {sorted(rewards)}, and each was told to count"
        if not trained.get(name, set()) <= rewards:
            yield f"{name} is trained with {trained[name]}, and {sorted(rewards)} was told to count"
    for name, reward in _refused(history):
        if reward in trained.get(name, ()) and reward not in taken.get(name, ()):
            yield f"{name} is trained with {reward}, which was told not to count"
    for name in trained.keys() - taken.keys():
        tried = {line["reward"] for line in history.of("posting") if line["trajectory"] == name}
        if not trained[name] <= tried:
            yield f"{name} is trained with {trained[name]}, and {sorted(tried)} were posted"


def rewards_taken(history: History) -> dict[str, set[float]]:
    """Trajectory -> the rewards of which a process was told that they count."""
    found: dict[str, set[float]] = {}
    for line in history.of("posted"):
        if line["outcome"] in TAKEN:
            found.setdefault(line["trajectory"], set()).add(line["reward"])
    return found


def _refused(history: History) -> Iterator[tuple[str, float]]:
    """Rewards of which a process was told that they do not count."""
    for line in history.of("posted", "refused"):
        is_late = line.facts.get("outcome") == "LATE"
        is_refused = "reward" in line.facts and line.facts.get("error", "").startswith("Conflict")
        if (is_late or is_refused) and line["trajectory"] not in history.lost:
            yield line["trajectory"], line["reward"]


def _trained(history: History) -> dict[str, set[float]]:
    """Trajectory that awaited its reward -> those with which it came to the ranks."""
    found: dict[str, set[float]] = {}
    for _, lines in history.complete_mini_batches():
        for row in itertools.chain.from_iterable(line["rows"] for line in lines):
            if row["trajectory"] in history.awaiting:
                found.setdefault(row["trajectory"], set()).add(row["reward"])
    return found


def nothing_awaits(counts: Mapping[str, int]) -> Violations:
    """No trajectory waits for its reward at the end of the run."""
    if num := counts.get("awaiting_reward", 0):
        yield f"{num} still await their reward"
