from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from testkit.summaries import make_summary
from turnstream.errors import InvalidConfigError
from turnstream_server.launch.job import job_folder, progress_display, progress_text


def test_progress_shows_time_step_reward_and_ledger() -> None:
    summary = make_summary(0.5, ledger={"open": 3, "committed": 1})

    text = progress_text(summary, elapsed_s=75.0, goal=0.6)

    numbers = "1:15  step 7  reward 0.500 of 0.600  0 tokens/s"
    assert text == f"{numbers}  ledger: open 3, committed 1"


def test_terminal_shows_the_newest_progress() -> None:
    out = io.StringIO()

    with progress_display(Console(file=out, force_terminal=True, width=100)) as show:
        show("step 7")

    assert "step 7" in out.getvalue()


@pytest.mark.parametrize(("every_s", "num_lines"), [(0.0, 2), (10.0, 0)])
def test_log_file_gets_a_line_at_intervals(
    monkeypatch: pytest.MonkeyPatch, every_s: float, num_lines: int
) -> None:
    out = io.StringIO()
    monkeypatch.setattr("turnstream_server.launch.job._LINE_EVERY_S", every_s)

    with progress_display(Console(file=out, width=60)) as show:
        for _ in range(2):
            show("step 7")

    assert len(out.getvalue().splitlines()) == num_lines


def test_files_of_a_job_stay_until_it_starts_again(tmp_path: Path) -> None:
    with job_folder(tmp_path / "a/b", job="demo") as folder:
        (folder / "logs").mkdir()
        (folder / "logs/old.log").write_text("old")
        (folder / "old.json").write_text("old")
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


def test_job_never_disturbs_another_one_at_work(tmp_path: Path) -> None:
    with job_folder(tmp_path / "a", job="demo") as folder:
        (folder / "store").mkdir()

        with (
            pytest.raises(InvalidConfigError, match="another demo is at work in"),
            job_folder(folder, job="demo"),
        ):
            pass

        assert (folder / "store").is_dir()
