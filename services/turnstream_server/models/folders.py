"""Folders that are whole or absent: written beside their place, synced to disk, renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UNFINISHED = ".unfinished-"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when the block ends without an error.

    After the block the files are on disk. Nobody ever sees `target` half written: after an error,
    or a crash, it is absent. An old `target` is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=target.parent))
    try:
        yield written
        for path in (*written.rglob("*"), written):
            _sync(path)
        written.chmod(0o755)  # mkdtemp's 0700 would hide weights from generators of other users
        remove_folder(target)
        written.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(written, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it is there, so that nobody sees it half removed."""
    if folder.exists():
        aside = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
        folder.rename(aside)
        shutil.rmtree(aside)


def remove_unfinished(parent: Path) -> None:
    """Remove what a process that was killed in here left. It must not run any more."""
    for leftover in parent.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
