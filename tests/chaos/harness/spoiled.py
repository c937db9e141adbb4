"""Right histories made wrong in what the processes beside the ranks did: posters and observers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness.episodes import episode, sampled
from harness.forging import WRITER, Lines, Writing, change, without, write_group
from harness.history import Line


def awaited(lines: Lines, *said: tuple[str, float]) -> Lines:
    """The lines where g0/0/0 awaited its reward, and posters were told this of these rewards."""
    name = "g0/0/0"
    lines = change(lines, "sealing", awaits=True, reward=None)
    for number, (outcome, reward) in enumerate(said):
        facts = {"trajectory": name, "reward": reward}
        told = Line(f"poster-{number}", "posted", 0.02, {**facts, "outcome": outcome})
        if outcome == "refused":
            told = Line(f"poster-{number}", "refused", 0.02, {**facts, "error": "ConflictError"})
        lines = [*lines, Line(f"poster-{number}", "posting", 0.01, facts), told]
    return lines


TRAINED = episode("g0/0/0", writer=WRITER).reward
OTHER = TRAINED + 1


def a_reward_that_nobody_was_told_of(lines: Lines) -> Lines:
    return [line for line in awaited(lines, ("POSTED", OTHER)) if line.kind != "posted"]


def a_lost_group_that_had_its_reward(lines: Lines) -> Lines:
    facts = {"trajectory": "g99/0/0", "reward": 1.0, "outcome": "POSTED"}
    return [*a_lost_group_that_waits(lines), Line("poster", "posted", 100.0, facts)]


def a_lost_group_that_waits(lines: Lines) -> Lines:
    writing = Writing()
    write_group(writing, "g99")
    later = [replace(line, at=line.at + 10.0) for line in writing.lines]
    return [*lines, *change(later, "sealing", awaits=True, reward=None)]


def an_observer_that_skips_a_step(lines: Lines) -> Lines:
    seen = ("observed", "seeing", "seen")
    return [line for line in lines if line.kind not in seen or line["step"] != 3]


def an_observer_that_goes_on_too_far_back(lines: Lines) -> Lines:
    """It had said to have seen step 2, and is given it again."""
    last = max(line.at for line in lines if line.process == "observer-1")
    return [*lines, Line("observer-1", "seen", last + 1e-4, {"step": 2})]


def an_observer_that_goes_on_too_far_ahead(lines: Lines) -> Lines:
    facts = ("observed", "seeing", "seen")
    return [
        line
        for line in lines
        if line.process != "observer-2" or line.kind not in facts or line["step"] > 3
    ]


def a_step_observed_from_another_manifest(lines: Lines) -> Lines:
    return change(lines, "observed", 2, manifest="m9")


def taken(lines: Lines, *, said_by: str) -> Lines:
    """The lines where somebody goes on with what another said, and finds this writer's turn."""
    name = "g0/0/0"
    found = sampled(name, writer=said_by, index=0).tolist()
    facts = {"trajectory": name, "num_turns": 1, "sampled": [found]}
    before = Line("generator-w", "appending", 0.01, {"trajectory": name, "turn": 0})
    return [*lines, before, Line("generator-v", "taken", 0.02, facts)]


BESIDE: list[tuple[str, Callable[[Lines], Lines]]] = [
    ("awaited_rewards_are_those_posted", awaited),
    ("awaited_rewards_are_those_posted", a_reward_that_nobody_was_told_of),
    ("awaited_rewards_are_those_posted", lambda ls: awaited(ls, ("POSTED", OTHER))),
    ("awaited_rewards_are_those_posted", lambda ls: awaited(ls, ("LATE", TRAINED))),
    ("awaited_rewards_are_those_posted", lambda ls: awaited(ls, ("refused", TRAINED))),
    (
        "awaited_rewards_are_those_posted",
        lambda ls: awaited(ls, ("POSTED", TRAINED), ("DUPLICATE", OTHER)),
    ),
    ("nothing_is_lost", a_lost_group_that_had_its_reward),
    ("takers_find_what_was_said", lambda ls: taken(ls, said_by="u")),
    ("observers_go_on_where_they_were", an_observer_that_skips_a_step),
    ("observers_go_on_where_they_were", an_observer_that_goes_on_too_far_back),
    ("observers_go_on_where_they_were", an_observer_that_goes_on_too_far_ahead),
    ("observers_go_on_where_they_were", lambda ls: without(ls, "observed", 1)),
    ("observers_go_on_where_they_were", lambda ls: change(ls, "observing", 1, missed=1)),
    ("observers_see_what_is_trained", a_step_observed_from_another_manifest),
    ("observers_see_what_is_trained", lambda ls: change(ls, "observed", 4, content="other")),
    ("everything_was_observed", an_observer_that_skips_a_step),
    ("everything_was_observed", lambda ls: without(ls, "observed_all")),
]
"""The law that each of them breaks, and how."""
