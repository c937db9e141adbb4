"""What a power cut excuses, and what it does not: two histories of one run, told by its logs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.checker import HistoryError, check
from harness.cuts import (
    SENT_AGAIN_S,
    Cut,
    gone_for_good,
    gone_with_their_writers,
    look_at,
    told_as_lost,
)
from harness.forging import Lines, change, every_share, right_history
from harness.history import History, Line
from harness.machine import Machine
from harness.rig import Rig
from testkit import ids
from turnstream.errors import StoreBehindError
from turnstream.generator import Publisher, RewardOutcome

LOST = "g0/0/0"
OPENING = ("opening", "opened")


def told_of_two_histories() -> Lines:
    """The right history, but the second session got another batch 3 than the first, and again 4.

    Steps 3 and 4 were planned anew between the two sessions.
    """

    def anew(facts: dict[str, Any]) -> dict[str, Any]:
        if facts["session"] != "second":
            return {}
        return {"manifest": f"n{facts['step']}", "content": f"new {facts['content']}"}

    lines = every_share(right_history(), anew)
    for position, step in ((3, 3), (4, 4)):
        lines = change(lines, "updated", position, manifest=f"n{step}")
    lines = change(lines, "done", 1, weights=["m1", "m2", "n3", "n4"])
    again = [
        Line("batcher-1", "planned", second_begins(lines) - 1e-4, facts)
        for facts in (
            {"step": 3, "epoch": 2, "manifest": "n3"},
            {"step": 4, "epoch": 2, "manifest": "n4"},
        )
    ]
    return [*lines, *again]


def second_begins(lines: Lines) -> float:
    """When the second session does."""
    return next(line.at for line in lines if line.facts.get("session") == "second")


def cut_between(lines: Lines, *, planned: int = 2, newest_version: int = 9) -> Cut:
    """A cut before the second session, which left so many steps."""
    return Cut(at=second_begins(lines) - 2e-4, planned=planned, newest_version=newest_version)


def test_steps_that_were_lost_may_be_planned_anew() -> None:
    lines = told_of_two_histories()

    check(History(lines, losses=[cut_between(lines)]), is_drained=True)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda cut: replace(cut, planned=3), "step (3, 0) differs in sessions first and second"),
        (lambda cut: replace(cut, planned=3), "step 3 was written in the epochs 2 and 2"),
        (lambda cut: replace(cut, at=cut.at + 100), "step (3, 0) differs in sessions first and"),
        (lambda cut: replace(cut, at=cut.at - 100), "step (3, 0) differs in sessions first and"),
        (lambda cut: replace(cut, at=cut.at - 100), "step 3 was written in the epochs 2 and 2"),
    ],
)
def test_steps_that_were_left_or_lost_at_another_time_may_not(
    edit: Callable[[Cut], Cut], what: str
) -> None:
    lines = told_of_two_histories()

    with pytest.raises(HistoryError, match=re.escape(what)):
        check(History(lines, losses=[edit(cut_between(lines))]))


def test_two_ranks_may_have_one_step_from_two_plans_only_around_a_cut() -> None:
    def torn(facts: dict[str, Any]) -> dict[str, Any]:
        is_last = (facts["session"], facts["step"], facts["dp_rank"]) == ("first", 3, 1)
        return {"manifest": "n3", "content": "other"} if is_last else {}

    lines = every_share(right_history(), torn)
    lines = [line for line in lines if not is_step(line, "stepped", "first", 3)]
    late = [line.at for line in lines if line.kind == "received" and line["manifest"] == "n3"]
    cut = Cut(at=min(late) - 1e-4, planned=2, newest_version=9)

    (name, *_) = [name for name in History(lines).received if name[:2] == ("first", 3)]
    assert History(lines, losses=[cut]).is_torn(History(lines).received[name])
    assert not History(lines).is_torn(History(lines).received[name])
    told = [line for line in lines if line.facts.get("session") != "second"]
    for losses, found in (([cut], False), ([], True)):
        try:
            check(History(told, losses=losses))
            texts = ""
        except HistoryError as error:
            texts = str(error)
        assert bool(re.search("ranks_share_one_manifest", texts)) == found, texts


def is_step(line: Line, kind: str, session: str, step: int) -> bool:
    return line.kind == kind and (line["session"], line["step"]) == (session, step)


def test_a_version_that_was_lost_may_be_announced_again_and_no_other() -> None:
    lines = right_history()
    repeated = change(lines, "announced", 3, version=3)  # the first session had announced 1 to 3

    check(History(repeated, losses=[cut_between(repeated, newest_version=2)]))

    with pytest.raises(HistoryError, match="version 3 was announced after 3"):
        check(History(repeated, losses=[cut_between(repeated, newest_version=3)]))


def test_the_ledger_may_be_without_what_is_excused_and_nothing_else() -> None:
    lines = right_history()
    opened = [Line("v", kind, 100.0, {"group": "x", "num_samples": 1}) for kind in OPENING]
    sealed = [Line("v", kind, 101.0, {"trajectory": "x/0/0"}) for kind in ("sealing", "sealed")]
    counts = {"accepted": 16, "committed": 16}
    name = {"x/0/0"}

    check(History([*lines, *opened, *sealed], excused=name, unknown=name), counts=counts)

    for excused, unknown in ((name, ()), ((), name)):
        history = History([*lines, *opened, *sealed], excused=excused, unknown=unknown)
        with pytest.raises(HistoryError, match="ledger_adds_up"):
            check(history, counts=counts)


def test_a_group_of_which_a_member_is_gone_may_end_untrained() -> None:
    lines = right_history()
    opened = [Line("v", kind, 100.0, {"group": "x", "num_samples": 2}) for kind in OPENING]
    sealed = [
        Line("v", kind, 101.0, {"trajectory": f"x/{sample}/0"})
        for sample in range(2)
        for kind in ("sealing", "sealed")
    ]
    whole = [*lines, *opened, *sealed]

    check(History(whole, gone={"x/1/0"}), is_drained=True)

    with pytest.raises(HistoryError, match="nothing_is_lost: x/0/0 were acknowledged"):
        check(History(whole, excused={"x/1/0"}), is_drained=True)


def sealed_by(process: str, *, last_seen: float) -> list[Line]:
    return [
        Line(process, "sealing", 1.0, {"trajectory": LOST}),
        Line(process, "alive", last_seen, {}),
    ]


CUT = Cut(at=2.0, planned=0, newest_version=-1, seals=frozenset({LOST}), openings=frozenset({LOST}))


def test_what_is_gone_is_excused_where_its_generator_died_before_it_could_send_it_again() -> None:
    lines = sealed_by("generator-w", last_seen=2.0 + SENT_AGAIN_S - 1)

    assert gone_with_their_writers(lines, [CUT], told={}) == ({LOST}, {LOST})
    kept = replace(CUT, openings=frozenset())
    assert gone_with_their_writers(lines, [kept], told={}) == ({LOST}, set())


@pytest.mark.parametrize("last", [("alive", 2.0 + SENT_AGAIN_S), ("done", 3.0)])
def test_what_a_generator_had_to_send_again_is_not_excused(last: tuple[str, float]) -> None:
    kind, at = last
    lines = [*sealed_by("generator-w", last_seen=1.5), Line("generator-w", kind, at, {})]

    assert gone_with_their_writers(lines, [CUT], told={}) == (set(), set())
    told = {"generator-w": {LOST}}
    assert gone_with_their_writers(lines, [CUT], told=told) == ({LOST}, {LOST})
    assert gone_with_their_writers(lines, [CUT], told={"generator-v": {LOST}}) == (set(), set())


def test_of_two_generators_both_must_be_dead() -> None:
    lines = [
        *sealed_by("generator-w", last_seen=3.0),
        *sealed_by("generator-v", last_seen=3.0 + SENT_AGAIN_S),
    ]

    assert gone_with_their_writers(lines, [CUT], told={}) == (set(), set())


def test_what_nobody_cut_is_not_excused() -> None:
    lines = sealed_by("generator-w", last_seen=3.0)
    other = replace(CUT, seals=frozenset({"g9/0/0"}), openings=frozenset({"g9/0/0"}))

    assert gone_with_their_writers([*lines], [], told={}) == (set(), set())
    with pytest.raises(KeyError):  # a cut takes only what somebody wrote
        gone_with_their_writers(lines, [other], told={})


@pytest.mark.parametrize(
    ("last_seen", "expected"), [(2.0 + SENT_AGAIN_S - 1, {LOST}), (2.0 + SENT_AGAIN_S, set[str]())]
)
def test_a_reward_is_gone_where_who_posted_it_died_before_it_could_post_it_again(
    tmp_path: Path, last_seen: float, expected: set[str]
) -> None:
    lines = [
        Line("poster-1", "posting", 1.0, {"trajectory": LOST, "reward": 1.0}),
        Line("poster-1", "alive", last_seen, {}),
    ]
    cut = Cut(at=2.0, planned=0, newest_version=-1, rewards=frozenset({LOST}))

    gone = gone_for_good(lines, [cut], logs=tmp_path)

    assert gone == (set(), set(), expected)
    assert gone_for_good(lines, [], logs=tmp_path) == (set(), set(), set())


@pytest.mark.redis
def test_a_store_without_power_is_left_with_what_it_had_synced_and_its_writer_says_so(
    start_rig: Callable[..., Rig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path)
    rig = start_rig(binary=machine.binary)
    with Publisher(rig.server.url, rig.run, writer="w", keep_s=0.5) as publisher:
        seal(publisher, "kept")
        awaits = publisher.trajectory("awaits", 0, num_samples=1)
        awaits.append(ids("ab"), ids("c"))
        awaits.seal(awaits_reward=True)
        half = publisher.trajectory("half", 0, num_samples=1)
        half.append(ids("ab"), ids("c")).result(10)
        rig.wait(lambda: machine.unsynced(rig.server.data_dir) == 0, "a sync")
        machine.freeze_disk()
        half.append(ids("abc"), ids("d")).result(10)
        publisher.flush_to_disk(30)
        half.append(ids("abcd"), ids("e")).result(10)
        half.seal(1.0)
        assert publisher.post_reward(awaits.key, 1.0) is RewardOutcome.POSTED
        rig.server.kill()
        machine.lose_power(rig.server.data_dir)
        names = ("kept/0/0", "awaits/0/0", "half/0/0", "never/0/0")
        lines = [Line("generator-w", "sealing", 1.0, {"trajectory": name}) for name in names]
        lines.append(Line("poster-1", "posting", 1.0, {"trajectory": "awaits/0/0", "reward": 1.0}))

        cut = look_at(rig.server.data_dir, lines, run=rig.run, binary=machine.binary, at=2.0)

        rig.server.restart()
        seal(publisher, "after")
        with pytest.raises(StoreBehindError, match="half/0/0: the store came back without turn 1"):
            publisher.flush()
    assert (cut.planned, cut.newest_version) == (0, -1)
    assert cut.rewards == {"awaits/0/0"}
    assert (cut.seals, cut.openings) == ({"half/0/0", "never/0/0"}, {"never/0/0"})
    log = tmp_path / "logs/generator-w.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("\n".join(record.getMessage() for record in caplog.records))
    assert told_as_lost(log.parent) == {"generator-w": {"half/0/0"}}


def seal(publisher: Publisher, group: str) -> None:
    with publisher.trajectory(group, 0, num_samples=1) as writer:
        writer.append(ids("ab"), ids("c")).result(10)
        writer.seal(1.0)
