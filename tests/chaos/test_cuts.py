"""The checker excuses the losses of a power cut, and nothing else."""

from __future__ import annotations

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


def planned_again() -> Lines:
    """Return a history whose second session got another batch 3, and whose batches 3 and 4 differ.

    Steps 3 and 4 were planned again between the two sessions.
    """

    def again(facts: dict[str, Any]) -> dict[str, Any]:
        if facts["session"] != "second":
            return {}
        return {"manifest": f"n{facts['step']}", "content": f"new {facts['content']}"}

    lines = every_share(right_history(), again)
    for position, step in ((3, 3), (4, 4)):
        lines = change(lines, "updated", position, manifest=f"n{step}")
    lines = change(lines, "done", 1, weights=["m1", "m2", "n3", "n4"])
    at = second_begins(lines) - 1e-4
    plans = [
        Line("batcher-1", "planned", at, {"step": step, "epoch": 2, "manifest": f"n{step}"})
        for step in (3, 4)
    ]
    return [*lines, *plans]


def second_begins(lines: Lines) -> float:
    return next(line.at for line in lines if line.facts.get("session") == "second")


def cut_between(lines: Lines, *, planned: int = 2, newest_version: int = 9) -> Cut:
    """Return a cut before the second session that left this many steps."""
    return Cut(at=second_begins(lines) - 2e-4, planned=planned, newest_version=newest_version)


def test_lost_steps_may_be_planned_again() -> None:
    lines = planned_again()

    check(History(lines, losses=[cut_between(lines)]), is_drained=True)


@pytest.mark.parametrize(
    "edit",
    [
        lambda cut: replace(cut, planned=3),
        lambda cut: replace(cut, at=cut.at + 100),
        lambda cut: replace(cut, at=cut.at - 100),
    ],
)
def test_steps_that_no_cut_took_may_not_be_planned_again(edit: Callable[[Cut], Cut]) -> None:
    lines = planned_again()

    with pytest.raises(HistoryError, match=r"step \(3, 0\) differs in sessions first and second"):
        check(History(lines, losses=[edit(cut_between(lines))]))


def test_ranks_may_have_two_plans_of_a_step_only_around_a_cut() -> None:
    def torn(facts: dict[str, Any]) -> dict[str, Any]:
        is_last = (facts["session"], facts["step"], facts["dp_rank"]) == ("first", 3, 1)
        return {"manifest": "n3", "content": "other"} if is_last else {}

    lines = [
        line
        for line in every_share(right_history(), torn)
        if line.facts.get("session") != "second" and (line.kind != "stepped" or line["step"] != 3)
    ]
    late = [line.at for line in lines if line.kind == "received" and line["manifest"] == "n3"]
    cut = Cut(at=min(late) - 1e-4, planned=2, newest_version=9)

    check(History(lines, losses=[cut]))

    with pytest.raises(HistoryError, match="ranks_share_one_manifest"):
        check(History(lines))


def test_only_a_lost_version_may_be_announced_again() -> None:
    lines = change(right_history(), "announced", 3, version=3)

    check(History(lines, losses=[cut_between(lines, newest_version=2)]))

    with pytest.raises(HistoryError, match="version 3 was announced after 3"):
        check(History(lines, losses=[cut_between(lines, newest_version=3)]))


def sealed_group(num_samples: int) -> Lines:
    """Return the lines of a group x that was opened and sealed after everything else."""
    opened = {"group": "x", "num_samples": num_samples}
    lines = [Line("v", kind, 100.0, opened) for kind in ("opening", "opened")]
    for sample in range(num_samples):
        seal = {"trajectory": f"x/{sample}/0"}
        lines += [Line("v", kind, 101.0, seal) for kind in ("sealing", "sealed")]
    return lines


def test_ledger_may_lack_only_what_is_excused() -> None:
    lines = [*right_history(), *sealed_group(1)]
    counts = {"accepted": 16, "committed": 16}
    name = {"x/0/0"}

    check(History(lines, excused=name, unknown=name), counts=counts)

    for excused, unknown in ((name, ()), ((), name)):
        with pytest.raises(HistoryError, match="ledger_adds_up"):
            check(History(lines, excused=excused, unknown=unknown), counts=counts)


def test_group_with_a_lost_member_may_end_untrained() -> None:
    lines = [*right_history(), *sealed_group(2)]

    check(History(lines, gone={"x/1/0"}), is_drained=True)

    with pytest.raises(HistoryError, match="nothing_is_lost: x/0/0 were acknowledged"):
        check(History(lines, excused={"x/1/0"}), is_drained=True)


def sealed_by(process: str, *, last_seen: float) -> Lines:
    return [
        Line(process, "sealing", 1.0, {"trajectory": LOST}),
        Line(process, "alive", last_seen, {}),
    ]


CUT = Cut(at=2.0, planned=0, newest_version=-1, seals=frozenset({LOST}), openings=frozenset({LOST}))


def test_loss_is_excused_where_its_generator_died_early() -> None:
    lines = sealed_by("generator-w", last_seen=2.0 + SENT_AGAIN_S - 1)

    assert gone_with_their_writers(lines, [CUT], told={}) == ({LOST}, {LOST})
    kept = replace(CUT, openings=frozenset())
    assert gone_with_their_writers(lines, [kept], told={}) == ({LOST}, set())


@pytest.mark.parametrize(
    "more",
    [
        [Line("generator-w", "alive", 2.0 + SENT_AGAIN_S, {})],
        [Line("generator-w", "done", 3.0, {})],
        sealed_by("generator-v", last_seen=3.0 + SENT_AGAIN_S),  # a second writer
    ],
)
def test_loss_is_not_excused_where_a_writer_lived_on(more: Lines) -> None:
    lines = [*sealed_by("generator-w", last_seen=1.5), *more]
    told = {line.process: {LOST} for line in lines}

    assert gone_with_their_writers(lines, [CUT], told={}) == (set(), set())
    assert gone_with_their_writers(lines, [CUT], told=told) == ({LOST}, {LOST})


@pytest.mark.parametrize(
    ("last_seen", "expected"), [(2.0 + SENT_AGAIN_S - 1, {LOST}), (2.0 + SENT_AGAIN_S, set[str]())]
)
def test_lost_reward_is_excused_where_its_poster_died_early(
    tmp_path: Path, last_seen: float, expected: set[str]
) -> None:
    lines = [
        Line("poster-1", "posting", 1.0, {"trajectory": LOST, "reward": 1.0}),
        Line("poster-1", "alive", last_seen, {}),
    ]
    cut = Cut(at=2.0, planned=0, newest_version=-1, rewards=frozenset({LOST}))

    assert gone_for_good(lines, [cut], logs=tmp_path) == (set(), set(), expected)
    assert gone_for_good(lines, [], logs=tmp_path) == (set(), set(), set())


@pytest.mark.redis
def test_store_after_a_power_cut_has_what_was_synced(
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
