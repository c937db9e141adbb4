"""The folders of snapshots below the folder that all workers share. Without torch."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import NamedTuple

from turnstream.errors import RunNotFoundError
from turnstream_server.models.folders import is_adapter_folder


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
