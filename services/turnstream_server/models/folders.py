"""Folders of weights. A new one is complete or absent: written, synced to disk, and renamed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from turnstream.errors import RunNotFoundError

_UNFINISHED = ".unfinished-"
_ADAPTER_CONFIG: Final = "adapter_config.json"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that becomes `target` when the block ends without an error.

    After the block the files are on disk. After an error or a crash there is no new `target`. An
    old `target` is replaced.
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


def is_adapter_folder(folder: Path) -> bool:
    """Return whether the folder holds an adapter, in the layout of peft, and no whole model."""
    return (folder / _ADAPTER_CONFIG).is_file()


def name_base(folder: Path, base: str) -> None:
    """Change the base model that an adapter folder names."""
    path = folder / _ADAPTER_CONFIG
    config = json.loads(path.read_bytes()) | {"base_model_name_or_path": base}
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it exists, in one rename and a later deletion."""
    if folder.exists():
        aside = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
        folder.rename(aside)
        shutil.rmtree(aside)


def remove_unfinished(parent: Path) -> list[str]:
    """Remove the unfinished folders of a killed process, and return their names."""
    names = sorted(leftover.name for leftover in parent.glob(f"{_UNFINISHED}*"))
    for name in names:
        shutil.rmtree(parent / name)
    return names


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class SnapshotFolder(NamedTuple):
    """Weights on disk, which never change. A folder that replaces it has another inode or time."""

    path: Path
    inode: int
    modified_ns: int

    @property
    def is_adapter(self) -> bool:
        """Whether the folder holds an adapter, and no whole model."""
        return is_adapter_folder(self.path)


def find_snapshot(shared: Path, folder: PurePosixPath) -> SnapshotFolder:
    """Return the snapshot of a folder below `shared`; RunNotFoundError if it is gone."""
    path = shared / folder
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise snapshot_gone(folder) from error
    return SnapshotFolder(path, found.st_ino, found.st_mtime_ns)


def snapshot_gone(folder: PurePosixPath | Path) -> RunNotFoundError:
    """Return the error of a folder that does not exist."""
    return RunNotFoundError(f"the checkpoint {folder} is gone")
