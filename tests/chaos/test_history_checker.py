"""The checker itself: it accepts a right history, and every invariant fails where it is broken."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.checker import AT_THE_END, CHECKS, HistoryError, check
from harness.episodes import episode, prompt_payload
from harness.forging import (
    Lines,
    Writing,
    change,
    edit_row,
    every_share,
    renamed,
    right_history,
    share,
    without,
    write_group,
)
from harness.history import History, Line
from harness.spoiled import BESIDE

Corrupt = Callable[[Lines], Lines]

COUNTS = {"accepted": 16, "committed": 16}


def a_batch_that_comes_twice(lines: Lines) -> Lines:
    def repeat(facts: dict[str, Any]) -> dict[str, Any]:
        same = share(1, facts["mini_batch"], facts["dp_rank"])
        return {"rows": same["rows"]} if facts["step"] == 4 else {}

    return every_share(lines, repeat)


def a_skipped_step(lines: Lines) -> Lines:
    return [line for line in lines if line.facts.get("step") != 2]


def a_row_twice_on_one_rank(lines: Lines) -> Lines:
    rows = next(line for line in lines if line.kind == "received")["rows"]
    return change(lines, "received", rows=[*rows, rows[0]])


def a_step_with_other_rows_after_the_restart(lines: Lines) -> Lines:
    return edit_row(lines, 12, num_trained=99)  # step 3 of the second session


def a_share_with_another_content_after_the_restart(lines: Lines) -> Lines:
    return change(lines, "received", 12, content="other")


def a_group_over_two_mini_batches(lines: Lines) -> Lines:
    def swap(facts: dict[str, Any]) -> dict[str, Any]:
        if facts["step"] != 1 or facts["dp_rank"] != 1:
            return {}
        return {"rows": share(1, 1 - facts["mini_batch"], 1)["rows"]}

    return every_share(lines, swap)


def a_group_without_a_member(lines: Lines) -> Lines:
    return change(lines, "received", 1, rows=[])


def ranks_that_share_a_row(lines: Lines) -> Lines:
    first = next(line for line in lines if line.kind == "received")
    second = [line for line in lines if line.kind == "received"][1]
    return change(lines, "received", 1, rows=[*second["rows"], first["rows"][0]])


def a_rank_that_never_came(lines: Lines) -> Lines:
    return [
        line
        for line in lines
        if not (line.kind == "received" and line["dp_rank"] == 1 and line["step"] == 4)
    ]


def a_wait_that_lasts(lines: Lines) -> Lines:
    late = next(line.at for line in lines if line.kind == "waited")
    return [replace(line, at=line.at + 60 * (line.at >= late)) for line in lines]


def a_wait_without_end_in_a_process_that_lives(lines: Lines) -> Lines:
    kept = [
        line for line in lines if line.process != "first-0" or line.kind not in ("waited", "done")
    ]
    waiting = [line for line in kept if line.process == "first-0" and line.kind == "waiting"][-1]
    kept = [line for line in kept if line.process != "first-0" or line.at <= waiting.at]
    alive = {"max_rss_bytes": 1, "held_bytes": 0, "max_held_bytes": 0}
    return [*kept, Line("first-0", "alive", waiting.at + 60, alive)]


def a_token_nobody_wrote(lines: Lines) -> Lines:
    def rename(facts: dict[str, Any]) -> dict[str, Any]:
        if facts["step"] != 1:
            return {}
        return {"rows": [{**row, "name": "other"} for row in facts["rows"]]}

    return every_share(lines, rename)


def a_lost_group(lines: Lines) -> Lines:
    writing = Writing()
    write_group(writing, "g99")
    return [*lines, *writing.lines]


def an_old_trainer_that_is_still_heard(lines: Lines) -> Lines:
    last = lines[-1].at
    step = {"step": 4, "token": "", "session": "first", "dp_rank": 0, "dp_world_size": 2}
    return [
        *lines,
        Line("first-0", "waiting", last + 1, {"what": "stepped", "deadline_s": 1.0}),
        Line("first-0", "waited", last + 1.1, {"what": "stepped", "outcome": ""}),
        Line("first-0", "stepped", last + 1.2, step),
    ]


def a_step_that_two_leaders_wrote(lines: Lines) -> Lines:
    twice = {"step": 2, "epoch": 2, "manifest": "m2"}
    return [*lines, Line("batcher-2", "planned", lines[-1].at, twice)]


def a_group_whose_last_member_never_sealed(lines: Lines) -> Lines:
    return change(change(lines, "opening", num_samples=3), "opened", num_samples=3)


def a_sample_that_is_trained_in_two_attempts(lines: Lines) -> Lines:
    def add(facts: dict[str, Any]) -> dict[str, Any]:
        if (facts["step"], facts["mini_batch"], facts["dp_rank"]) != (1, 0, 0):
            return {}
        again = {**facts["rows"][0], "row": 99, "trajectory": "g0/0/1"}
        return {"rows": [*facts["rows"], again]}

    return every_share(lines, add)


def a_fenced_writer_that_is_trained(lines: Lines) -> Lines:
    # "other" sealed something else, and was told that it counts.
    said = next(line for line in lines if line.kind == "sealing")
    own = episode(said["trajectory"], writer="other")
    sealing = said.but(rows=list(own.rows), num_trained=list(own.num_trained))
    told = next(line for line in lines if line.kind == "sealed")
    return [
        *[line for line in lines if line is not told],
        replace(sealing, process="other"),
        replace(told, process="other"),
    ]


def a_turn_that_is_gone_for_who_takes_over(lines: Lines) -> Lines:
    turn = {"trajectory": "g0/0/0", "turn": 1}
    taken = {"trajectory": "g0/0/0", "num_turns": 1}
    return [*lines, Line("w", "appended", 100.0, turn), Line("h", "taken", 101.0, taken)]


def a_turn_of_a_group_that_is_gone(lines: Lines) -> Lines:
    turn = {"trajectory": "g50/0/0", "turn": 0}
    return [*lines, Line("w", "appended", 100.0, turn)]


def a_rank_without_the_last_mini_batch(lines: Lines) -> Lines:
    last = [line for line in lines if line.kind == "received" and line["dp_rank"] == 1][-1]
    return [line for line in lines if line is not last]


def ranks_that_trained_from_two_manifests(lines: Lines) -> Lines:
    def other(facts: dict[str, Any]) -> dict[str, Any]:
        return {"manifest": "m9"} if facts["step"] == 4 and facts["dp_rank"] == 1 else {}

    return every_share(lines, other)


def an_update_from_another_manifest_than_was_delivered(lines: Lines) -> Lines:
    def other(facts: dict[str, Any]) -> dict[str, Any]:
        return {"manifest": "m9"} if facts["step"] == 4 else {}

    return every_share(lines, other)


def a_task_with_another_payload(lines: Lines) -> Lines:
    said = prompt_payload("p1").decode()
    facts = {"group": "p1%231", "num_samples": 1, "trajectories": ["p1%231/0/0"], "prompt": "p1"}
    return [
        *lines,
        Line("generator", "given", 100.0, {**facts, "payload": said}),
        Line("generator", "given", 101.0, {**facts, "payload": f"{said}, or so"}),
    ]


def two_visits_of_a_prompt_that_are_trained(lines: Lines) -> Lines:
    return renamed(lines, {"g0": "p%231", "g5": "p%232"})


CORRUPTIONS: list[tuple[str, Corrupt]] = [
    ("trained_once", a_batch_that_comes_twice),
    ("trained_once", a_row_twice_on_one_rank),
    ("weights_hold_each_step_once", lambda ls: change(ls, "done", 1, weights=["m1", "m1"])),
    ("surviving_steps_follow_one_another", a_skipped_step),
    ("restarts_return_what_followed", a_skipped_step),
    ("restarts_return_what_followed", a_step_with_other_rows_after_the_restart),
    ("restarts_return_what_followed", a_share_with_another_content_after_the_restart),
    ("restarts_return_what_followed", lambda ls: without(ls, "received", 0)),
    ("restarts_return_what_followed", lambda ls: without(ls, "received", 5)),
    ("groups_stay_whole", a_group_over_two_mini_batches),
    ("groups_stay_whole", a_group_without_a_member),
    ("groups_stay_whole", lambda ls: edit_row(ls, advantage=0.123)),
    ("groups_stay_whole", lambda ls: without(ls, "opening")),
    ("ranks_share_one_manifest", ranks_that_share_a_row),
    ("ranks_share_one_manifest", lambda ls: edit_row(ls, row=50)),
    ("ranks_share_one_manifest", a_rank_that_never_came),
    ("ranks_share_one_manifest", lambda ls: change(ls, "received", manifest="m9")),
    ("ranks_share_one_manifest", lambda ls: change(ls, "received", num_micro_batches=2)),
    ("denominators_are_of_the_rows", lambda ls: edit_row(ls, num_trained=99)),
    ("denominators_are_of_the_rows", lambda ls: change(ls, "received", denominators=[1] * 6)),
    ("waits_end", a_wait_that_lasts),
    ("waits_end", a_wait_without_end_in_a_process_that_lives),
    ("waits_end", lambda ls: without(ls, "waited")),
    ("bounds_hold", lambda ls: change(ls, "alive", held_bytes=11)),
    ("bounds_hold", lambda ls: change(ls, "alive", max_rss_bytes=1 << 40)),
    ("rows_are_what_was_said", a_token_nobody_wrote),
    ("rows_are_what_was_said", lambda ls: without(ls, "sealing")),
    ("versions_are_never_reused", lambda ls: change(ls, "announced", 3, version=2)),
    ("stale_sessions_are_refused", an_old_trainer_that_is_still_heard),
    ("steps_have_one_leader", a_step_that_two_leaders_wrote),
    ("steps_have_one_leader", lambda ls: change(ls, "planned", 2, epoch=1)),
    ("steps_have_one_leader", lambda ls: change(ls, "planned", 0, epoch=3)),
    ("steps_have_one_leader", lambda ls: change(ls, "planned", 0, manifest="m9")),
    ("groups_have_their_members", a_group_whose_last_member_never_sealed),
    ("groups_have_their_members", a_sample_that_is_trained_in_two_attempts),
    ("writers_are_told_the_truth", a_fenced_writer_that_is_trained),
    ("acknowledged_turns_are_kept", a_turn_that_is_gone_for_who_takes_over),
    ("acknowledged_turns_are_kept", a_turn_of_a_group_that_is_gone),
    ("steps_are_stepped_by_all_ranks", a_rank_without_the_last_mini_batch),
    ("steps_are_stepped_by_all_ranks", ranks_that_trained_from_two_manifests),
    ("steps_are_stepped_by_all_ranks", an_update_from_another_manifest_than_was_delivered),
    ("nothing_else_is_trained", lambda ls: change(ls, "opening", purpose="eval")),
    ("nothing_else_is_trained", a_task_with_another_payload),
    ("prompts_are_trained_once", two_visits_of_a_prompt_that_are_trained),
    ("nothing_is_lost", a_lost_group),
    *BESIDE,
]


def test_a_right_history_has_no_contradiction() -> None:
    history = History(right_history())

    check(history, counts=COUNTS, is_drained=True)

    # There was something to look at: two sessions, with step 3 in both; each check on its own.
    assert [session.updated for session in history.sessions] == [(1, 2, 3), (3, 4)]
    assert len(list(history.complete_mini_batches())) == 2 * (3 + 2)
    assert len(history.acknowledged) == COUNTS["committed"]
    assert {each.__name__: list(each(history)) for each in CHECKS} == {
        each.__name__: [] for each in CHECKS
    }


def _name(value: object) -> str | None:
    return value if isinstance(value, str) else getattr(value, "__name__", None)


@pytest.mark.parametrize(("invariant", "corrupt"), CORRUPTIONS, ids=_name)
def test_a_wrong_history_contradicts_the_invariant(invariant: str, corrupt: Corrupt) -> None:
    history = History(corrupt(right_history()))

    with pytest.raises(HistoryError, match=rf"(?m)^  {invariant}: ") as caught:
        check(history, is_drained=True)

    assert re.search(r"\d+ contradictions", str(caught.value))


@pytest.mark.parametrize(
    "counts",
    [
        {"accepted": 17, "committed": 16},  # one is nowhere
        {"accepted": 15, "committed": 15},  # an opened one was forgotten
        {"accepted": 17, "committed": 17},  # one that nobody opened
        {"accepted": 16, "committed": 12, "open": 4},  # sealed ones are open again
        {"accepted": 16, "committed": 12, "stepped": 4},  # committed ones are no longer so
        {"accepted": 16, "committed": 12, "planned": 4},
    ],
)
def test_a_ledger_that_the_history_contradicts_is_found(counts: dict[str, int]) -> None:
    with pytest.raises(HistoryError, match="ledger_adds_up"):
        check(History(right_history()), counts=counts)


@pytest.mark.parametrize("num_evaluated", [1, 3])
def test_evaluations_that_the_ledger_does_not_have_are_found(num_evaluated: int) -> None:
    writing = Writing()
    write_group(writing, "e")
    later = [replace(line, at=line.at + 10.0) for line in writing.lines]
    evaluation = change(later, "opening", purpose="eval")
    history = History([*right_history(), *evaluation])
    counts = {"accepted": 18, "committed": 16, "evaluated": 2}

    check(history, counts=counts, is_drained=True)

    wrong = {**counts, "accepted": 16 + num_evaluated, "evaluated": num_evaluated}
    with pytest.raises(HistoryError, match="evaluations_add_up"):
        check(history, counts=wrong, is_drained=True)


def test_tasks_are_among_what_generators_were_told_of_and_tried() -> None:
    name = "p1%231"
    given = {"group": name, "num_samples": 2, "prompt": "p1", "trajectories": [f"{name}/0/0"]}
    facts = {**given, "payload": prompt_payload("p1").decode()}
    lines = [*right_history(), Line("v", "asking_task", 100.0, {"num_samples": 2})]
    answered = [*lines, Line("v", "given", 101.0, facts)]
    in_vain = [*lines, Line("v", "asked_task_in_vain", 101.0, {"num_samples": 2})]

    for allowed, kept in ((0, in_vain), (0, lines), (2, lines), (1, answered), (2, answered)):
        check(History(kept), counts={"accepted": 16 + allowed, "committed": 16, "open": allowed})

    for wrong, kept in ((1, in_vain), (3, lines), (0, answered)):
        with pytest.raises(HistoryError, match="ledger_adds_up"):
            check(History(kept), counts={"accepted": 16 + wrong, "committed": 16, "open": wrong})


def test_every_invariant_is_broken_above() -> None:
    broken = {invariant for invariant, _ in CORRUPTIONS}

    assert {each.__name__ for each in (*CHECKS, *AT_THE_END)} | {"bounds_hold"} == broken


def test_a_sleep_of_the_process_is_no_late_answer() -> None:
    lines = a_wait_that_lasts(right_history())
    last = lines[-1].at
    slept = Line("generator", "paused", last, {"since": 0.1, "until": 59.9})
    dozed = slept.but(until=50.0)
    other = replace(slept, process="first-0")

    check(History([*lines, slept]), counts=COUNTS, is_drained=True)
    for no_excuse in (dozed, other):
        with pytest.raises(HistoryError, match="waits_end: generator: a wait for admission"):
            check(History([*lines, no_excuse]), counts=COUNTS, is_drained=True)


def test_what_was_rolled_back_does_not_survive() -> None:
    history = History(right_history())

    assert history.surviving == {1: "first", 2: "first", 3: "second", 4: "second"}
