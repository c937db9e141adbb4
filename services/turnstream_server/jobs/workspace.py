"""The folder of a job: everything it writes is inside, and only its own leavings are removed."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

from turnstream.errors import InvalidConfigError

_MARK = ".turnstream-job"


@contextlib.contextmanager
def job_folder(folder: Path, *, job: str) -> Iterator[Path]:
    """An empty folder for as long as a job works in it; what is in it then stays.

    It is made if it is missing, and what an earlier run of the same job left is removed.

    Raises:
        InvalidConfigError: the folder holds something that this job did not make, or another one
            is at work there.
    """
    folder = folder.absolute()
    mark = folder / _MARK
    _check_is_ours(folder, mark, job)
    folder.mkdir(parents=True, exist_ok=True)
    with mark.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidConfigError("data_dir", f"another {job} is at work in {folder}") from None
        _empty(folder)
        lock.truncate(0)
        lock.write(f"{job}\n")
        lock.flush()
        yield folder


def _check_is_ours(folder: Path, mark: Path, job: str) -> None:
    if not folder.exists():
        return
    is_ours = mark.is_file() and mark.read_text(encoding="utf-8").strip() == job
    if not is_ours and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidConfigError("data_dir", f"{folder} holds something else than a {job}")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _MARK:
            path.unlink()
