from __future__ import annotations

from pathlib import Path

import pytest

from turnstream.errors import InvalidConfigError
from turnstream_server.jobs.stack import job_folder


def test_makes_a_folder_that_is_missing(tmp_path: Path) -> None:
    with job_folder(tmp_path / "a/b", job="demo") as folder:
        assert folder.is_dir()
        assert folder.is_absolute()


def test_files_of_a_job_stay_until_it_starts_again(tmp_path: Path) -> None:
    with job_folder(tmp_path / "a", job="demo") as folder:
        (folder / "logs").mkdir()
        (folder / "logs/old.log").write_text("old")
        (folder / "old.json").write_text("old")
    assert (folder / "logs/old.log").exists()

    with job_folder(tmp_path / "a", job="demo"):
        assert [path.name for path in folder.iterdir()] == [".turnstream-job"]


def test_never_removes_what_is_not_its_own(tmp_path: Path) -> None:
    with job_folder(tmp_path / "a", job="replay") as folder:
        (folder / "precious.txt").write_text("mine")

    with (
        pytest.raises(InvalidConfigError, match=r"data_dir: .* something else than a demo"),
        job_folder(folder, job="demo"),
    ):
        pass

    assert (folder / "precious.txt").read_text() == "mine"


def test_never_disturbs_a_job_that_is_at_work(tmp_path: Path) -> None:
    with job_folder(tmp_path / "a", job="demo") as folder:
        (folder / "store").mkdir()

        with (
            pytest.raises(InvalidConfigError, match="another demo is at work in"),
            job_folder(folder, job="demo"),
        ):
            pass

        assert (folder / "store").is_dir()


def test_takes_a_folder_that_is_empty_and_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")

    with job_folder(tmp_path / "empty", job="demo") as folder:
        assert folder.is_dir()
    with pytest.raises(InvalidConfigError), job_folder(tmp_path / "file", job="demo"):
        pass
