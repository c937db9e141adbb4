"""Clocks that jump, and disks that lose their power."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from turnstream_server.embedded import find_binary

_SOURCE = Path(__file__).with_name("shim.c")


class Machine:
    """The simulated machine of one server, and of other processes with their own clocks.

    `binary` is the server on this machine, for `EmbeddedServer`; `folder` gets the shim and its
    notes.
    """

    def __init__(self, folder: Path, *, server: Path | None = None) -> None:
        self._folder = folder
        self._shim = _build_shim(folder)
        self._synced = folder / "synced"
        self._synced.mkdir()
        variables = {**self.environment(), "TS_SYNCED": str(self._synced)}
        environment = " ".join(f'{name}="{value}"' for name, value in variables.items())
        self.binary = folder / "server"
        program = f'{environment} exec "{server or find_binary()}" "$@"'
        self.binary.write_text(f"#!/bin/sh\n{program}\n")
        self.binary.chmod(0o700)

    def environment(self, of: str = "store") -> dict[str, str]:
        """Return the variables of a process that uses the clock of this name."""
        return {"LD_PRELOAD": str(self._shim), "TS_CLOCK": str(self._clock(of))}

    def set_clock(self, *, wrong_by_s: float, of: str = "store") -> None:
        """The wall clock jumps, to so many seconds from the truth."""
        draft = self._clock(of).with_suffix(".draft")
        draft.write_text(str(round(wrong_by_s * 1e6)))
        draft.replace(self._clock(of))  # a reader never gets half of the number

    def has_seen_clock(self, of: str) -> bool:
        """Whether a process has looked at this clock since it jumped."""
        clock = self._clock(of)
        seen = clock.with_name(f"{clock.name}.seen")
        return seen.exists() and seen.read_text() == clock.read_text()

    def _clock(self, of: str) -> Path:
        return self._folder / f"clock-{of}"

    def freeze_disk(self) -> None:
        """From now on the disk says that it has written, and has not."""
        (self._synced / "frozen").touch()

    def lose_power(self, data_dir: Path) -> int:
        """Cut the files of a killed server to their synced part; return the lost bytes."""
        num_lost = 0
        for path in _append_only_files(data_dir):
            synced = self._synced_size(path)
            num_lost += path.stat().st_size - synced
            os.truncate(path, synced)
        (self._synced / "frozen").unlink(missing_ok=True)
        return num_lost

    def synced(self, data_dir: Path) -> int:
        """Bytes of the append-only files that are on disk."""
        return sum(map(self._synced_size, _append_only_files(data_dir)))

    def _synced_size(self, path: Path) -> int:
        note = self._synced / str(path.stat().st_ino)
        return int(note.read_text() or 0) if note.exists() else 0  # it is made, then written


def _build_shim(folder: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the shim with")
    shim = folder / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(shim)]
    subprocess.run([*command, str(_SOURCE), "-ldl"], check=True, capture_output=True)
    return shim


def _append_only_files(data_dir: Path) -> list[Path]:
    return list(data_dir.glob("appendonlydir/*.incr.aof"))
