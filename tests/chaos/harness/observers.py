"""Invariants of an observer: it receives the trained batches, in order and completely."""

from __future__ import annotations

from collections.abc import Iterator

from harness.history import History, Line

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
        if history.surviving.get(line["step"]) != line["session"]:
            continue
        found = seen.get(line["step"], [])
        if not any(each["manifest"] == line["manifest"] for each in found):
            yield f"step {line['step']} was trained and never observed"
