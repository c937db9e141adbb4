from __future__ import annotations

from pathlib import Path

import pytest

from turnstream.errors import InvalidConfigError
from turnstream_server.jobs.job import job_folder


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
