"""Prompts of the run are trained once each, and evaluations are never trained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from harness.episodes import prompt_payload
from harness.history import History

Violations = Iterator[str]

_VISIT = re.compile(r"(?P<prompt>.+)%23\d+")
"""The name of a group that a run has opened for one of its prompts."""


def nothing_else_is_trained(history: History) -> Violations:
    """No batch has a group that was opened to evaluate, and tasks are what the run was given."""
    for line in history.of("received"):
        for row in line["rows"]:
            if row["trajectory"].split("/")[0] in history.evaluations:
                yield f"{row['trajectory']} of step {line['step']} was opened to evaluate"
    for line in history.of("given"):
        if line["payload"] != prompt_payload(line["prompt"]).decode():
            yield f"{line.process} was given {line['payload']!r} for the prompt {line['prompt']}"


def prompts_are_trained_once(history: History) -> Violations:
    """A prompt that is given out again, because its group was lost, is trained in one visit."""
    visits: dict[str, str] = {}
    for group in sorted(trained_groups(history)):
        visit = _VISIT.fullmatch(group)
        if visit is not None and (other := visits.setdefault(visit["prompt"], group)) != group:
            yield f"the prompt {visit['prompt']} is trained as {other} and {group}"


def trained_prompts(history: History) -> set[str]:
    """Names of the prompts of which a group survives in the weights."""
    found = (_VISIT.fullmatch(group) for group in trained_groups(history))
    return {visit["prompt"] for visit in found if visit is not None}


def trained_groups(history: History) -> set[str]:
    """The groups of all surviving steps."""
    return {row["trajectory"].split("/")[0] for _, row in history.surviving_rows}


def evaluations_add_up(history: History, counts: Mapping[str, int]) -> Violations:
    """Every trajectory that was sealed to evaluate is part of an evaluation at the end."""
    sure = {
        name
        for group in history.evaluations
        for name in history.acknowledged_by_group.get(group, set()) - history.excused
    }
    tried = {name for name in history.seals if name.split("/")[0] in history.evaluations}
    evaluated = counts.get("evaluated", 0)
    if not len(sure) <= evaluated <= len(tried):
        yield f"{evaluated} are evaluated, {len(sure)} were acknowledged and {len(tried)} tried"
