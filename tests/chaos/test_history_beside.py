"""What the checker allows and finds of processes beside the ranks: posters and observers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.checker import HistoryError, check
from harness.cuts import Cut
from harness.forging import Lines, change, right_history
from harness.history import FORGOTTEN_S, History, Line
from harness.refusals import refusals_have_a_cause
from harness.spoiled import OTHER, TRAINED, a_lost_group_that_waits, awaited, taken

COUNTS = {"accepted": 16, "committed": 16}


@pytest.mark.parametrize(
    "said",
    [
        [("POSTED", TRAINED)],
        [("DUPLICATE", TRAINED), ("LATE", OTHER)],
        [("refused", OTHER), ("POSTED", TRAINED)],
        [("LATE", TRAINED), ("POSTED", TRAINED)],  # too late once, and in time from another process
    ],
)
def test_a_reward_that_was_told_to_count_may_come_late_from_others(
    said: list[tuple[str, float]],
) -> None:
    lines = awaited(right_history(), *said)

    check(History(lines), counts=COUNTS, is_drained=True)


def test_a_group_without_its_reward_may_end_untrained_and_waits_no_longer() -> None:
    history = History(a_lost_group_that_waits(right_history()))
    counts = {"accepted": 18, "committed": 16, "incomplete": 2}

    check(history, counts=counts, is_drained=True)

    wrong = {"accepted": 18, "committed": 16, "sealed": 1, "awaiting_reward": 1}
    with pytest.raises(HistoryError, match="nothing_awaits: 1 still await their reward"):
        check(history, counts=wrong, is_drained=True)


def observed_before(lines: Lines) -> Lines:
    """The lines where the observers saw all of it ten seconds before the ranks."""
    return [replace(line, at=line.at - 10 * line.process.startswith("observer")) for line in lines]


def lost(lines: Lines, *, planned: int) -> Cut:
    """A cut between the observers and the ranks."""
    return Cut(at=lines[0].at - 5, planned=planned, newest_version=-1)


def test_a_plan_that_was_lost_need_not_be_observed_again() -> None:
    lines = observed_before(right_history())
    for position in (8, 9):  # step 4
        lines = change(lines, "observed", position, manifest="lost")

    check(History(lines, losses=[lost(lines, planned=3)]), counts=COUNTS, is_drained=True)

    for losses in ([], [lost(lines, planned=4)]):
        with pytest.raises(HistoryError, match="everything_was_observed: step 4") as caught:
            check(History(lines, losses=losses), counts=COUNTS, is_drained=True)
        assert "observers_see_what_is_trained: step 4 was observed as lost" in str(caught.value)


def test_what_a_store_forgot_to_be_seen_may_be_observed_again() -> None:
    lines = right_history()
    killed = max(line.at for line in lines if line.process == "observer-1")
    told = [*lines, Line("observer-1", "seen", killed + 1e-4, {"step": 2})]
    cut = Cut(at=killed + 2e-4, planned=4, newest_version=-1)

    check(History(told, losses=[cut]), counts=COUNTS, is_drained=True)

    with pytest.raises(HistoryError, match="observers_go_on_where_they_were: observer-2 observed"):
        check(History(told, losses=[replace(cut, at=killed + 100)]), counts=COUNTS)


def test_whoever_takes_over_finds_what_the_writer_before_had_said() -> None:
    lines = taken(right_history(), said_by="w")

    check(History(lines), counts=COUNTS, is_drained=True)


def test_a_turn_that_a_cut_took_need_not_be_found() -> None:
    turn = {"trajectory": "g0/0/0", "turn": 1}
    found = {"trajectory": "g0/0/0", "num_turns": 1}
    lines = [
        *right_history(),
        Line("generator-w", "appended", 100.0, turn),
        Line("generator-v", "taken", 101.0, found),
    ]
    cut = Cut(at=100.5, planned=9, newest_version=-1)

    check(History(lines, losses=[cut]))

    for at in (99.5, 101.5, 100.0 + FORGOTTEN_S):
        with pytest.raises(HistoryError, match="found 1 turns of g0/0/0, not 2"):
            check(History(lines, losses=[replace(cut, at=at)]))


REFUSED = {"trajectory": "g0/0/0", "error": "FencedError: it is another's"}


def test_a_refusal_has_a_cause_where_another_took_over_or_a_cut_took_it() -> None:
    refused = Line("generator-w", "refused", 9.0, REFUSED)
    taken = Line("generator-v", "taken", 8.0, {"trajectory": "g0/0/0", "num_turns": 1})

    assert not [*refusals_have_a_cause(History([refused, taken]), lost=())]
    assert not [*refusals_have_a_cause(History([refused]), lost={"g0/0/0"})]
    assert not [*refusals_have_a_cause(History([refused]), lost={"g0/1/0"})]  # with its group


@pytest.mark.parametrize(
    ("process", "facts", "lost"),
    [
        ("generator-w", REFUSED, ()),
        ("generator-w", REFUSED, {"g1/0/0"}),
        ("generator-v", REFUSED, ()),  # who took it itself
        ("generator-w", {**REFUSED, "error": "TimeoutError"}, {"g0/0/0"}),
        ("poster-1", {**REFUSED, "error": "ConflictError: it is open"}, ()),
        ("generator-w", {"group": "g0", "error": "ConflictError: it is over"}, ()),
    ],
)
def test_a_refusal_without_a_cause_is_found(
    process: str, facts: dict[str, str], lost: set[str]
) -> None:
    refused = Line(process, "refused", 9.0, facts)
    taken = Line("generator-v", "taken", 8.0, {"trajectory": "g0/0/0", "num_turns": 1})
    history = History([refused, *[taken] * (process == "generator-v")])

    (found,) = refusals_have_a_cause(history, lost=lost)

    assert found.startswith(f"{process} was refused g0")


def test_the_end_of_the_run_and_a_second_reward_are_no_loss() -> None:
    second = "ConflictError: another reward was posted for g0/0/0"
    lines = [
        Line("generator-w", "refused", 9.0, {"group": "g9", "error": "EndOfRunError"}),
        Line("poster-1", "refused", 9.0, {"trajectory": "g0/0/0", "error": second}),
    ]

    assert not [*refusals_have_a_cause(History(lines), lost=())]


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_group_that_nobody_has_noted_but_who_took_it_over_was_opened(is_noted: bool) -> None:
    # Its generator was killed between the answer of the store and the line in its log.
    group = next(line["group"] for line in right_history() if line.kind == "opening")
    lines = [line for line in right_history() if line.facts.get("group") != group]
    found = {"trajectory": f"{group}/0/0", "num_turns": 0, "sampled": []}
    noted = {"num_samples": 2} if is_noted else {}
    asked = Line("generator-w", "asking_task", lines[0].at, {"num_samples": 2})
    taken = Line("generator-v", "taken", lines[0].at, {**found, **noted})
    history = History([asked, taken, *lines])

    if is_noted:
        check(history, counts=COUNTS, is_drained=True)
    else:
        with pytest.raises(HistoryError, match=f"group {group} was never opened"):
            check(history, counts=COUNTS, is_drained=True)
