"""The checker accepts a correct history, and finds every broken invariant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.checker import AT_THE_END, CHECKS, HistoryError, check
from harness.episodes import episode, prompt_payload, sampled
from harness.forging import (
    WRITER,
    Lines,
    change,
    edit_row,
    edit_shares,
    lose_group,
    renamed,
    right_history,
    share,
    without,
)
from harness.history import History, Line
from harness.losses import refusals_have_a_cause

Corrupt = Callable[[Lines], Lines]

COUNTS = {"accepted": 16, "committed": 16}
TRAINED = episode("g0/0/0", writer=WRITER).reward
OTHER = TRAINED + 1


def repeat_batch(lines: Lines) -> Lines:
    def rows(facts: dict[str, Any]) -> dict[str, Any]:
        return {"rows": share(1, facts["mini_batch"], facts["dp_rank"])["rows"]}

    return edit_shares(lines, rows, step=4)


def skip_step(lines: Lines) -> Lines:
    return [line for line in lines if line.facts.get("step") != 2]


def split_group(lines: Lines) -> Lines:
    def rows(facts: dict[str, Any]) -> dict[str, Any]:
        return {"rows": share(1, 1 - facts["mini_batch"], 1)["rows"]}

    return edit_shares(lines, rows, step=1, dp_rank=1)


def share_row(lines: Lines) -> Lines:
    first, second = [line for line in lines if line.kind == "received"][:2]
    return change(lines, "received", 1, rows=[*second["rows"], first["rows"][0]])


def wait_too_long(lines: Lines) -> Lines:
    late = next(line.at for line in lines if line.kind == "waited")
    return [replace(line, at=line.at + 60 * (line.at >= late)) for line in lines]


def wait_for_ever(lines: Lines) -> Lines:
    waiting = [line for line in lines if line.process == "first-0" and line.kind == "waiting"][-1]
    kept = [line for line in lines if line.process != "first-0" or line.at <= waiting.at]
    alive = {"max_rss_bytes": 1, "held_bytes": 0, "max_held_bytes": 0}
    return [*kept, Line("first-0", "alive", waiting.at + 60, alive)]


def lose_rewarded_group(lines: Lines) -> Lines:
    facts = {"trajectory": "g99/0/0", "reward": 1.0, "outcome": "POSTED"}
    return [*wait_for_reward(lines), Line("poster", "posted", 100.0, facts)]


def wait_for_reward(lines: Lines) -> Lines:
    lost = lose_group(lines)
    number = sum(line.kind == "sealing" for line in lines)
    return change(lost, "sealing", number, awaits=True, reward=None)


def step_in_old_session(lines: Lines) -> Lines:
    last = lines[-1].at
    step = {"step": 4, "token": "", "session": "first", "dp_rank": 0, "dp_world_size": 2}
    return [
        *lines,
        Line("first-0", "waiting", last + 1, {"what": "stepped", "deadline_s": 1.0}),
        Line("first-0", "waited", last + 1.1, {"what": "stepped", "outcome": ""}),
        Line("first-0", "stepped", last + 1.2, step),
    ]


def plan_step_twice(lines: Lines) -> Lines:
    twice = {"step": 2, "epoch": 2, "manifest": "m2"}
    return [*lines, Line("batcher-2", "planned", lines[-1].at, twice)]


def leave_member_out(lines: Lines) -> Lines:
    return change(change(lines, "opening", num_samples=3), "opened", num_samples=3)


def train_two_attempts(lines: Lines) -> Lines:
    def rows(facts: dict[str, Any]) -> dict[str, Any]:
        again = {**facts["rows"][0], "row": 99, "trajectory": "g0/0/1"}
        return {"rows": [*facts["rows"], again]}

    return edit_shares(lines, rows, step=1, mini_batch=0, dp_rank=0)


def train_fenced_writer(lines: Lines) -> Lines:
    # "other" sealed another episode, and its seal was acknowledged.
    said = next(line for line in lines if line.kind == "sealing")
    own = episode(said["trajectory"], writer="other")
    sealing = said.but(rows=list(own.rows), num_trained=list(own.num_trained))
    told = next(line for line in lines if line.kind == "sealed")
    return [
        *[line for line in lines if line is not told],
        replace(sealing, process="other"),
        replace(told, process="other"),
    ]


def lose_turn(lines: Lines) -> Lines:
    turn = {"trajectory": "g0/0/0", "turn": 1}
    taken = {"trajectory": "g0/0/0", "num_turns": 1}
    return [*lines, Line("w", "appended", 100.0, turn), Line("h", "taken", 101.0, taken)]


def change_manifest(**where: Any) -> Corrupt:
    return lambda lines: edit_shares(lines, lambda _: {"manifest": "m9"}, step=4, **where)


def drop_last_mini_batch(lines: Lines) -> Lines:
    last = [line for line in lines if line.kind == "received" and line["dp_rank"] == 1][-1]
    return [line for line in lines if line is not last]


def change_payload_of_task(lines: Lines) -> Lines:
    said = prompt_payload("p1").decode()
    facts = {"group": "p1%231", "num_samples": 1, "trajectories": ["p1%231/0/0"], "prompt": "p1"}
    return [*lines, Line("generator", "given", 100.0, {**facts, "payload": f"{said}, or so"})]


def awaited(*said: tuple[str, float]) -> Corrupt:
    """Let g0/0/0 await its reward, with these answers to posted rewards."""

    def corrupt(lines: Lines) -> Lines:
        lines = change(lines, "sealing", awaits=True, reward=None)
        for number, (outcome, reward) in enumerate(said):
            facts = {"trajectory": "g0/0/0", "reward": reward}
            told = Line(f"poster-{number}", "posted", 0.02, {**facts, "outcome": outcome})
            if outcome == "refused":
                told = Line(f"poster-{number}", "refused", 0.02, {**facts, "error": "Conflict"})
            lines = [*lines, Line(f"poster-{number}", "posting", 0.01, facts), told]
        return lines

    return corrupt


def take_over(*, said_by: str) -> Corrupt:
    """Let another generator find the first turn of a writer."""

    def corrupt(lines: Lines) -> Lines:
        found = sampled("g0/0/0", writer=said_by, index=0).tolist()
        facts = {"trajectory": "g0/0/0", "num_turns": 1, "sampled": [found]}
        before = Line("generator-w", "appending", 0.01, {"trajectory": "g0/0/0", "turn": 0})
        return [*lines, before, Line("generator-v", "taken", 0.02, facts)]

    return corrupt


CORRUPTIONS: list[tuple[str, Corrupt]] = [
    ("trained_once", repeat_batch),
    ("weights_hold_each_step_once", lambda ls: change(ls, "done", 1, weights=["m1", "m1"])),
    ("restarts_return_what_followed", skip_step),
    ("restarts_return_what_followed", lambda ls: edit_row(ls, 12, num_trained=99)),
    ("restarts_return_what_followed", lambda ls: change(ls, "received", 12, content="other")),
    ("groups_stay_whole", split_group),
    ("groups_stay_whole", lambda ls: edit_row(ls, advantage=0.123)),
    ("ranks_share_one_manifest", share_row),
    ("ranks_share_one_manifest", lambda ls: edit_row(ls, row=50)),
    ("ranks_share_one_manifest", lambda ls: change(ls, "received", num_micro_batches=2)),
    ("denominators_are_of_the_rows", lambda ls: edit_row(ls, num_trained=99)),
    ("waits_end", wait_too_long),
    ("waits_end", wait_for_ever),
    ("bounds_hold", lambda ls: change(ls, "alive", held_bytes=11)),
    ("bounds_hold", lambda ls: change(ls, "alive", max_rss_bytes=1 << 40)),
    ("rows_are_what_was_said", lambda ls: without(ls, "sealing")),
    ("rows_are_what_was_said", train_fenced_writer),
    ("versions_are_never_reused", lambda ls: change(ls, "announced", 3, version=2)),
    ("stale_sessions_are_refused", step_in_old_session),
    ("steps_have_one_leader", plan_step_twice),
    ("steps_have_one_leader", lambda ls: change(ls, "planned", 0, epoch=3)),
    ("steps_have_one_leader", lambda ls: change(ls, "planned", 0, manifest="m9")),
    ("groups_have_their_members", leave_member_out),
    ("groups_have_their_members", train_two_attempts),
    ("groups_have_their_members", lambda ls: without(ls, "opening")),
    ("adopted_turns_are_those_appended", lose_turn),
    ("adopted_turns_are_those_appended", take_over(said_by="u")),
    ("steps_are_stepped_by_all_ranks", drop_last_mini_batch),
    ("steps_are_stepped_by_all_ranks", change_manifest(dp_rank=1)),
    ("steps_are_stepped_by_all_ranks", change_manifest()),
    ("nothing_else_is_trained", lambda ls: change(ls, "opening", purpose="eval")),
    ("nothing_else_is_trained", change_payload_of_task),
    ("prompts_are_trained_once", lambda ls: renamed(ls, {"g0": "p%231", "g5": "p%232"})),
    ("awaited_rewards_are_those_posted", awaited()),
    ("awaited_rewards_are_those_posted", awaited(("POSTED", OTHER))),
    ("awaited_rewards_are_those_posted", awaited(("LATE", TRAINED))),
    ("awaited_rewards_are_those_posted", awaited(("POSTED", TRAINED), ("DUPLICATE", OTHER))),
    ("nothing_is_lost", lose_group),
    ("nothing_is_lost", lose_rewarded_group),
]


def _name(value: object) -> str | None:
    return value if isinstance(value, str) else getattr(value, "__name__", None)


@pytest.mark.parametrize(("invariant", "corrupt"), CORRUPTIONS, ids=_name)
def test_wrong_history_contradicts_the_invariant(invariant: str, corrupt: Corrupt) -> None:
    history = History(corrupt(right_history()))

    with pytest.raises(HistoryError, match=rf"(?m)^  {invariant}: "):
        check(history, is_drained=True)


def test_every_invariant_is_broken_above() -> None:
    broken = {invariant for invariant, _ in CORRUPTIONS}

    assert {each.__name__ for each in (*CHECKS, *AT_THE_END)} | {"bounds_hold"} == broken


def test_correct_history_has_no_contradiction() -> None:
    history = History(right_history())

    check(history, counts=COUNTS, is_drained=True)

    assert [session.updated for session in history.sessions] == [(1, 2, 3), (3, 4)]
    assert history.surviving == {1: "first", 2: "first", 3: "second", 4: "second"}
    assert len(list(history.complete_mini_batches())) == 2 * (3 + 2)


@pytest.mark.parametrize(
    "corrupt",
    [
        awaited(("DUPLICATE", TRAINED), ("LATE", OTHER)),
        awaited(("refused", OTHER), ("POSTED", TRAINED)),
        awaited(("LATE", TRAINED), ("POSTED", TRAINED)),  # in time from another process
        take_over(said_by="w"),
    ],
)
def test_unusual_history_is_accepted(corrupt: Corrupt) -> None:
    check(History(corrupt(right_history())), counts=COUNTS, is_drained=True)


@pytest.mark.parametrize(
    "counts",
    [
        {"accepted": 17, "committed": 16},  # one has no state
        {"accepted": 15, "committed": 15},  # an opened one is missing
        {"accepted": 17, "committed": 17},  # one that no generator opened
        {"accepted": 16, "committed": 12, "open": 4},  # sealed ones are open again
        {"accepted": 16, "committed": 12, "stepped": 4},  # committed ones are stepped again
        {"accepted": 16, "committed": 12, "planned": 4},
    ],
)
def test_ledger_that_contradicts_the_history_is_found(counts: dict[str, int]) -> None:
    with pytest.raises(HistoryError, match="ledger_adds_up"):
        check(History(right_history()), counts=counts)


def test_counts_of_evaluations_and_awaited_rewards_are_checked() -> None:
    evaluation = change(lose_group([]), "opening", purpose="eval")
    evaluated = {"accepted": 18, "committed": 16, "evaluated": 2}
    incomplete = {"accepted": 18, "committed": 16, "incomplete": 2}

    check(History([*right_history(), *evaluation]), counts=evaluated, is_drained=True)
    check(History(wait_for_reward(right_history())), counts=incomplete, is_drained=True)

    wrong = {"accepted": 17, "committed": 16, "evaluated": 1}
    with pytest.raises(HistoryError, match="evaluations_add_up"):
        check(History([*right_history(), *evaluation]), counts=wrong, is_drained=True)
    wrong = {"accepted": 18, "committed": 16, "sealed": 1, "awaiting_reward": 1}
    with pytest.raises(HistoryError, match="nothing_awaits: 1 still await their reward"):
        check(History(wait_for_reward(right_history())), counts=wrong, is_drained=True)


def test_sleep_of_a_process_excuses_a_late_answer() -> None:
    lines = wait_too_long(right_history())
    slept = Line("generator", "paused", lines[-1].at, {"since": 0.1, "until": 59.9})

    check(History([*lines, slept]), counts=COUNTS, is_drained=True)

    for no_excuse in (slept.but(until=50.0), replace(slept, process="first-0")):
        with pytest.raises(HistoryError, match="waits_end: generator: a wait for admission"):
            check(History([*lines, no_excuse]), counts=COUNTS, is_drained=True)


REFUSED = {"trajectory": "g0/0/0", "error": "FencedError: another generator holds it"}
TAKEN = Line("generator-v", "taken", 8.0, {"trajectory": "g0/0/0", "num_turns": 1})


def test_refusal_after_an_adoption_or_the_end_has_a_cause() -> None:
    refused = Line("generator-w", "refused", 9.0, REFUSED)
    second = "ConflictError: another reward was posted for g0/0/0"
    end = Line("generator-w", "refused", 9.0, {"group": "g9", "error": "EndOfRunError"})
    rewarded = Line("poster-1", "refused", 9.0, {"trajectory": "g0/0/0", "error": second})

    assert not [*refusals_have_a_cause(History([refused, TAKEN]))]
    assert not [*refusals_have_a_cause(History([end, rewarded]))]


@pytest.mark.parametrize(
    ("process", "facts"),
    [
        ("generator-w", REFUSED),
        ("generator-v", REFUSED),  # it adopted the trajectory itself
        ("generator-w", {**REFUSED, "error": "TimeoutError"}),
        ("poster-1", {**REFUSED, "error": "ConflictError: it is open"}),
    ],
)
def test_refusal_without_a_cause_is_found(process: str, facts: dict[str, str]) -> None:
    refused = Line(process, "refused", 9.0, facts)
    is_taken = not process.startswith("poster") and (process, facts) != ("generator-w", REFUSED)
    history = History([refused, *[TAKEN] * is_taken])

    (found,) = refusals_have_a_cause(history)

    assert found.startswith(f"{process} was refused g0")
