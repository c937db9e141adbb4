"""The checker accepts a correct history, and finds every broken invariant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.checker import CHECKS, HistoryError, check
from harness.episodes import episode, sampled
from harness.forging import (
    WRITER,
    Facts,
    Lines,
    change,
    edit_row,
    edit_shares,
    group_lines,
    right_history,
    share,
    without,
)
from harness.history import History, Line
from harness.losses import lost_trajectories, refusals_have_a_cause
from harness.stored import archive_is_what_was_trained
from turnstream_server.batcher.assembly.archive import archive_path

Corrupt = Callable[[Lines], Lines]

COUNTS = {"accepted": 16, "committed": 16}


def lose_group(lines: Lines) -> Lines:
    return [*lines, *group_lines("g99", at=10.0)]


def repeat_batch(lines: Lines) -> Lines:
    def rows(facts: Facts) -> Facts:
        return {"rows": share(1, facts["mini_batch"], facts["dp_rank"])["rows"]}

    return edit_shares(lines, rows, step=4)


def skip_step(lines: Lines) -> Lines:
    return [line for line in lines if line.facts.get("step") != 2]


def split_group(lines: Lines) -> Lines:
    def rows(facts: Facts) -> Facts:
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
    return [*kept, Line("first-0", "alive", waiting.at + 60, {"max_rss_bytes": 1})]


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


def log_no_plan(lines: Lines) -> Lines:
    return [line for line in lines if line.kind != "planned"]


def train_two_attempts(lines: Lines) -> Lines:
    def rows(facts: Facts) -> Facts:
        again = {**facts["rows"][0], "row": 99, "trajectory": "g0/0/1"}
        return {"rows": [*facts["rows"], again]}

    return edit_shares(lines, rows, step=1, mini_batch=0, dp_rank=0)


def train_fenced_writer(lines: Lines) -> Lines:
    # "other" sealed another episode, and its seal was acknowledged.
    sealing = next(line for line in lines if line.kind == "sealing")
    own = episode(sealing["trajectory"], writer="other")
    other = sealing.but(rows=list(own.rows), num_trained=list(own.num_trained))
    sealed = next(line for line in lines if line.kind == "sealed")
    kept = [line for line in lines if line is not sealed]
    return [*kept, replace(other, process="other"), replace(sealed, process="other")]


def lose_turn(lines: Lines) -> Lines:
    turn = {"trajectory": "g0/0/0", "turn": 1}
    taken = {"trajectory": "g0/0/0", "num_turns": 1}
    return [*lines, Line("w", "appended", 100.0, turn), Line("h", "adopted", 101.0, taken)]


def adopt_turn_of(writer: str) -> Corrupt:
    """Let a generator adopt a trajectory of "w" and find the first turn of this writer."""

    def corrupt(lines: Lines) -> Lines:
        found = sampled("g0/0/0", writer=writer, index=0).tolist()
        facts = {"trajectory": "g0/0/0", "num_turns": 1, "sampled": [found]}
        before = Line("generator-w", "appending", 0.01, {"trajectory": "g0/0/0", "turn": 0})
        return [*lines, before, Line("generator-v", "adopted", 0.02, facts)]

    return corrupt


def change_manifest(**where: Any) -> Corrupt:
    return lambda lines: edit_shares(lines, lambda _: {"manifest": "m9"}, step=4, **where)


def drop_last_mini_batch(lines: Lines) -> Lines:
    last = [line for line in lines if line.kind == "received" and line["dp_rank"] == 1][-1]
    return [line for line in lines if line is not last]


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
    ("steps_have_one_leader", log_no_plan),
    ("steps_have_one_leader", lambda ls: change(ls, "planned", 0, epoch=3)),
    ("steps_have_one_leader", lambda ls: change(ls, "planned", 0, manifest="m9")),
    ("groups_have_their_members", lambda ls: change(ls, "opening", num_samples=3)),
    ("groups_have_their_members", train_two_attempts),
    ("groups_have_their_members", lambda ls: without(ls, "opening")),
    ("adopted_turns_are_those_appended", lose_turn),
    ("adopted_turns_are_those_appended", adopt_turn_of("u")),
    ("steps_are_stepped_by_all_ranks", drop_last_mini_batch),
    ("steps_are_stepped_by_all_ranks", change_manifest(dp_rank=1)),
    ("steps_are_stepped_by_all_ranks", change_manifest()),
    ("nothing_is_lost", lose_group),
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

    assert {each.__name__ for each in CHECKS} | {"bounds_hold", "nothing_is_lost"} == broken


def test_correct_history_has_no_contradiction() -> None:
    history = History(adopt_turn_of("w")(right_history()))

    check(history, counts=COUNTS, is_drained=True)

    assert [session.updated for session in history.sessions] == [(1, 2, 3), (3, 4)]
    assert history.surviving == {1: "first", 2: "first", 3: "second", 4: "second"}
    assert len(list(history.complete_mini_batches())) == 2 * (3 + 2)


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


def test_sleep_of_a_process_excuses_a_late_answer() -> None:
    lines = wait_too_long(right_history())
    slept = Line("generator", "paused", lines[-1].at, {"since": 0.1, "until": 59.9})

    check(History([*lines, slept]), counts=COUNTS, is_drained=True)

    for no_excuse in (slept.but(until=50.0), replace(slept, process="first-0")):
        with pytest.raises(HistoryError, match="waits_end: generator: a wait for admission"):
            check(History([*lines, no_excuse]), counts=COUNTS, is_drained=True)


FENCED = {"trajectory": "g0/0/0", "error": "FencedError: another generator writes it"}


@pytest.mark.parametrize(
    ("facts", "adopted_by", "cuts", "has_cause"),
    [
        (FENCED, "generator-v", [], True),
        ({"group": "g9", "error": "EndOfRunError"}, "", [], True),
        (FENCED, "", [8.0], True),
        (FENCED, "", [10.0], False),  # the cut came later
        (FENCED, "", [], False),
        (FENCED, "generator-w", [], False),  # it adopted the trajectory itself
        ({**FENCED, "error": "TimeoutError"}, "generator-v", [], False),
    ],
)
def test_refusal_needs_an_adoption_a_cut_or_the_end(
    facts: dict[str, str], adopted_by: str, cuts: list[float], has_cause: bool
) -> None:
    lines = [Line("generator-w", "refused", 9.0, facts)]
    if adopted_by:
        adopted = {"trajectory": "g0/0/0", "num_turns": 1}
        lines.append(Line(adopted_by, "adopted", 8.0, adopted))

    found = list(refusals_have_a_cause(History(lines, cuts=cuts)))

    assert (found == []) == has_cause


def plan_later_steps_again(lines: Lines) -> Lines:
    """Return a history whose second session has other contents of step 3."""
    return edit_shares(
        lines, lambda facts: {"content": f"new {facts['content']}"}, session="second", step=3
    )


@pytest.mark.parametrize(
    ("corrupt", "lost", "found"),
    [
        (plan_later_steps_again, (), "differs in sessions first and second"),
        (lose_group, ("g99/0/0",), "were acknowledged and never trained"),
    ],
)
def test_cut_excuses_its_losses_alone(corrupt: Corrupt, lost: tuple[str, ...], found: str) -> None:
    lines = corrupt(right_history())

    check(History(lines, cuts=[1.0], lost=lost), is_drained=True)
    with pytest.raises(HistoryError, match=found):
        check(History(lines), is_drained=True)
    with pytest.raises(HistoryError, match="were acknowledged and never trained"):
        check(History(lose_group(lines), cuts=[1.0], lost=["g0/0/0"]), is_drained=True)


@pytest.mark.parametrize(
    ("sealed_s", "last_s", "cuts", "is_lost"),
    [
        (9.0, 12.0, [10.0], True),
        (9.0, 26.0, [10.0], False),  # its generator lived on
        (4.0, 12.0, [10.0], False),  # it was on the disk
        (4.0, 12.0, [8.0, 10.0], True),  # it was on the disk neither before nor after the resend
        (9.0, 30.0, [10.0, 28.0], False),  # it was sent again before the second cut
        (11.0, 12.0, [10.0], False),
    ],
)
def test_cut_may_take_newest_writes_of_dead_generators(
    tmp_path: Path, sealed_s: float, last_s: float, cuts: list[float], is_lost: bool
) -> None:
    sealed = Line("generator-w", "sealed", sealed_s, {"trajectory": "g0/0/0"})
    alive = Line("generator-w", "alive", last_s, {})

    lost = lost_trajectories([sealed, alive], cuts, logs=tmp_path)

    assert lost == ({"g0/0/0"} if is_lost else set())


def test_loss_that_a_publisher_named_is_excused(tmp_path: Path) -> None:
    text = "run chaos: p7#1/0/0 was acknowledged, and the store lost it: it is fenced\n"
    (tmp_path / "generator-w.log").write_text(text)

    assert lost_trajectories([], [10.0], logs=tmp_path) == {"p7%231/0/0"}


def archive_step(history: History, folder: Path, step: int, **columns: Any) -> None:
    rows = history.rows(session=history.surviving[step], step=step)
    tokens = [
        episode(row["trajectory"], writer=WRITER).columns[row["sequence"]]._asdict() for row in rows
    ]
    table = {
        "trajectory_id": [row["trajectory"] for row in rows],
        "sequence_index": [row["sequence"] for row in rows],
        "reward": [row["reward"] for row in rows],
        **{name: [each[name] for each in tokens] for name in tokens[0]},
        **columns,
    }
    path = archive_path(folder, "r", step)
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(table).replace_schema_metadata({"manifest_hash": f"m{step}"}), path)


def archive_another_plan(_: History, path: Path) -> None:
    pq.write_table(pq.read_table(path).replace_schema_metadata({"manifest_hash": "m9"}), path)


def archive_a_trajectory_twice(history: History, path: Path) -> None:
    first = history.rows(session=history.surviving[1], step=1)[0]["trajectory"]
    rows = history.rows(session=history.surviving[2], step=2)
    names = [first, *(row["trajectory"] for row in rows[1:])]
    archive_step(history, path.parents[1], 2, trajectory_id=names)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda _, path: None, []),
        (lambda _, path: path.unlink(), ["step 2 is released, and cannot be read"]),
        (archive_another_plan, ["step 2 is archived as m9"]),
        (archive_a_trajectory_twice, ["the rows of step 2", "g0/0/0 is in 2 archived steps"]),
    ],
)
def test_wrong_archive_is_found(
    tmp_path: Path, spoil: Callable[[History, Path], object], found: list[str]
) -> None:
    history = History(right_history())
    for step in (1, 2):
        archive_step(history, tmp_path, step)

    spoil(history, archive_path(tmp_path, "r", 2))

    wrong = list(archive_is_what_was_trained(history, tmp_path, run="r", released=2))
    assert len(wrong) == len(found)
    assert all(each.startswith(start) for each, start in zip(wrong, found, strict=True))
