"""A server whose clock jumps and whose disk loses power: the program, with a shim before it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.rig import server_with
from turnstream_server.embedded import find_binary

_SOURCE = Path(__file__).with_name("shim.c")


class Machine:
    """The machine of one server.

    Args:
        folder: for the shim and its notes.

    Attributes:
        binary: the server on this machine, for `EmbeddedServer`.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler to build the shim with")
        shim = folder / "shim.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(shim)]
        subprocess.run([*command, str(_SOURCE), "-ldl"], check=True, capture_output=True)
        self._clock = folder / "clock"
        self._synced = folder / "synced"
        self._synced.mkdir()
        environment = f'LD_PRELOAD="{shim}" TS_CLOCK="{self._clock}" TS_SYNCED="{self._synced}"'
        self.binary = server_with(folder, find_binary(), environment=environment)

    def set_clock(self, *, wrong_by_s: float) -> None:
        """The wall clock jumps, to so many seconds from the truth."""
        _write_us(self._clock, wrong_by_s)

    def slow_disk_down(self, *, sync_s: float) -> None:
        """From now on every sync takes so long."""
        _write_us(self._synced / "slow", sync_s)

    def freeze_disk(self) -> None:
        """From now on the disk says that it has written, and has not."""
        (self._synced / "frozen").touch()

    def lose_power(self, data_dir: Path) -> int:
        """What the append-only files of a killed server lose; gives the bytes that are gone."""
        num_lost = self.unsynced(data_dir)
        for path in _append_only_files(data_dir):
            os.truncate(path, self._synced_size(path))
        (self._synced / "frozen").unlink(missing_ok=True)
        return num_lost

    def unsynced(self, data_dir: Path) -> int:
        """Bytes of the append-only files that are not on disk."""
        files = _append_only_files(data_dir)
        return sum(path.stat().st_size - self._synced_size(path) for path in files)

    def _synced_size(self, path: Path) -> int:
        note = self._synced / str(path.stat().st_ino)
        return int(note.read_text()) if note.exists() else 0


def _write_us(path: Path, seconds: float) -> None:
    """Microseconds as text, never half of them."""
    draft = path.with_suffix(".draft")
    draft.write_text(str(round(seconds * 1e6)))
    draft.replace(path)


def _append_only_files(data_dir: Path) -> list[Path]:
    return list(data_dir.glob("appendonlydir/*.incr.aof"))
