"""The folder of a rollout: a lock, a note for each task in work, and the files of each task."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from turnstream.errors import InvalidConfigError
from turnstream.types import TrajectoryKey

_LONGEST_NAME: Final = 150
_TAIL_BYTES: Final = 4_096


class SampleFiles(NamedTuple):
    """The files of one sample."""

    task: Path
    output: Path
    reward: Path


class RolloutFolder:
    """The folder, which one rollout uses at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open = path / "open"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock in the block; InvalidConfigError if another rollout holds it."""
        self._open.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                text = f"another rollout uses {self.path}: choose another folder"
                raise InvalidConfigError("--logs", text) from error
            yield

    def begin(self, group_id: str, payload: bytes, body: Mapping[str, Any]) -> None:
        """Write the file of a task, and the note that abandons it after a crash."""
        name = folder_name(group_id)
        (self.path / name).mkdir(exist_ok=True)
        (self.path / name / "task.json").write_bytes(payload)
        (self._open / name).write_text(json.dumps(body), encoding="utf-8")

    def end(self, group_id: str) -> None:
        """Delete the note of a task."""
        (self._open / folder_name(group_id)).unlink(missing_ok=True)

    def left_open(self) -> list[dict[str, Any]]:
        """Return the notes of an earlier rollout that was killed."""
        found: list[dict[str, Any]] = []
        for path in sorted(self._open.iterdir()):
            try:
                found.append(json.loads(path.read_bytes()))
            except ValueError:
                path.unlink()  # it was not written whole: no agent was started
        return found

    def files_of(self, key: TrajectoryKey) -> SampleFiles:
        """Return the files of a sample."""
        folder = self.path / folder_name(key.group_id)
        name = f"{key.sample}.{key.attempt}"
        return SampleFiles(folder / "task.json", folder / f"{name}.log", folder / f"{name}.reward")


def folder_name(group_id: str) -> str:
    """Return the name of the folder of a group, different for each group.

    >>> folder_name("math/7#1")
    'math%2F7#1'
    """
    name = quote(group_id, safe="#")
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(group_id.encode()).hexdigest()[:16]}"


def tail(path: Path) -> str:
    """Return the end of a text file; "" if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
