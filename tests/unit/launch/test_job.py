from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from testkit.runs.summaries import make_summary
from turnstream.errors import InvalidConfigError
from turnstream_server.launch.demo import judge
from turnstream_server.launch.job import job_folder, progress_display, progress_text
from turnstream_server.launch.replay import IncompleteReplayError, check_complete


def test_progress_shows_time_step_reward_and_ledger() -> None:
    summary = make_summary(0.5, ledger={"open": 3, "committed": 1})

    text = progress_text(summary, elapsed_s=75.0, goal=0.6)

    numbers = "1:15  step 7  reward 0.500 of 0.600  0 tokens/s"
    assert text == f"{numbers}  ledger: open 3, committed 1"


@pytest.mark.parametrize(
    ("every_s", "is_terminal", "is_shown"),
    [(10.0, True, True), (0.0, False, True), (10.0, False, False)],
)
def test_progress_is_shown_on_a_terminal_and_in_a_log_at_intervals(
    monkeypatch: pytest.MonkeyPatch, every_s: float, is_terminal: bool, is_shown: bool
) -> None:
    out = io.StringIO()
    monkeypatch.setattr("turnstream_server.launch.job._LINE_EVERY_S", every_s)

    with progress_display(Console(file=out, force_terminal=is_terminal, width=100)) as show:
        for _ in range(2):
            show("step 7")

    assert ("step 7" in out.getvalue()) == is_shown
    assert is_terminal or len(out.getvalue().splitlines()) == 2 * is_shown


def test_files_of_a_job_stay_until_it_starts_again(tmp_path: Path) -> None:
    with job_folder(tmp_path / "a/b", job="demo") as folder:
        (folder / "logs").mkdir()
        (folder / "logs/old.log").write_text("old")
        (folder / "old.json").write_text("old")
        with (
            pytest.raises(InvalidConfigError, match="another demo is at work in"),
            job_folder(folder, job="demo"),
        ):
            pass
    assert (folder / "logs/old.log").exists()

    with job_folder(tmp_path / "a/b", job="demo"):
        assert [path.name for path in folder.iterdir()] == [".turnstream-job"]


def test_job_never_removes_files_of_others(tmp_path: Path) -> None:
    with job_folder(tmp_path / "a", job="replay") as folder:
        (folder / "precious.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()

    for taken in (folder, tmp_path / "file"):
        with (
            pytest.raises(InvalidConfigError, match=r"data_dir: .* other content than a demo"),
            job_folder(taken, job="demo"),
        ):
            pass
    with job_folder(tmp_path / "empty", job="demo") as folder:
        assert folder.is_absolute()

    assert (tmp_path / "a/precious.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("first", "last", "has_learned"),
    [
        (0.2, 0.60, True),
        (0.2, 0.59, False),  # doubled, but not 0.6 of the best
        (0.4, 0.80, True),
        (0.4, 0.79, False),  # 0.6 of the best, but not doubled
        (0.0, 0.60, True),
        (0.7, 1.00, True),  # no policy can double it
    ],
)
def test_goal_is_double_the_reward_and_a_share_of_the_best(
    first: float, last: float, has_learned: bool
) -> None:
    assert judge(make_summary(first, *[0.5] * 8, last), least=0.6)[0] is has_learned


def test_verdict_names_the_rewards_and_the_goal() -> None:
    _, words = judge(make_summary(0.2, *[0.5] * 9), least=0.6)

    assert "0.500 in the last tenth, 0.200 in the first" in words
    assert "wanted: 0.600" in words
    assert judge(make_summary(), least=0.6) == (False, "no game was finished")


def test_replay_is_complete_when_every_trajectory_has_ended() -> None:
    check_complete(
        make_summary(ledger={"committed": 6, "incomplete": 1, "abandoned": 1}), num_trajectories=8
    )

    with pytest.raises(IncompleteReplayError, match="the file has 8 trajectories, the ledger 7"):
        check_complete(make_summary(ledger={"committed": 7}), num_trajectories=8)


@pytest.mark.parametrize("state", ["open", "sealed", "awaiting_reward", "planned", "stepped"])
def test_trajectory_that_has_not_ended_is_an_error(state: str) -> None:
    with pytest.raises(IncompleteReplayError, match=rf"trajectories that are {state} \(2\)"):
        check_complete(make_summary(ledger={"committed": 6, state: 2}), num_trajectories=8)
