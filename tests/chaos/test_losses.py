"""The checker excuses what a power cut may take, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.checker import HistoryError, check
from harness.forging import Lines, edit_shares, lose_group, right_history
from harness.history import History, Line
from harness.losses import lost_trajectories, refusals_have_a_cause


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
def test_cut_excuses_its_losses_alone(
    corrupt: Callable[[Lines], Lines], lost: tuple[str, ...], found: str
) -> None:
    lines = corrupt(right_history())

    check(History(lines, cuts=[1.0], lost=lost), is_drained=True)
    with pytest.raises(HistoryError, match=found):
        check(History(lines), is_drained=True)
    with pytest.raises(HistoryError, match="were acknowledged and never trained"):
        check(History(lose_group(lines), cuts=[1.0], lost=["g0/0/0"]), is_drained=True)


def test_refusal_soon_after_a_cut_has_a_cause() -> None:
    refused = Line(
        "generator-w", "refused", 9.0, {"trajectory": "g0/0/0", "error": "FencedError: it is held"}
    )

    assert not [*refusals_have_a_cause(History([refused], cuts=[8.0]))]
    assert [*refusals_have_a_cause(History([refused], cuts=[10.0]))]


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


def test_cut_may_take_the_reward_of_a_dead_poster(tmp_path: Path) -> None:
    sealed = Line("generator-w", "sealed", 9.0, {"trajectory": "g0/0/0"})
    alive = Line("generator-w", "alive", 26.0, {})
    posted = Line("poster-1", "posted", 9.5, {"trajectory": "g0/0/0"})

    assert lost_trajectories([sealed, alive, posted], [10.0], logs=tmp_path) == {"g0/0/0"}


def test_loss_that_a_publisher_named_is_excused(tmp_path: Path) -> None:
    text = "run chaos: p7#1/0/0 was acknowledged, and the store lost it: it is fenced\n"
    (tmp_path / "generator-w.log").write_text(text)

    assert lost_trajectories([], [10.0], logs=tmp_path) == {"p7%231/0/0"}
