"""The Lua scripts of both packages, found by their names."""

from __future__ import annotations

from pathlib import Path

import turnstream
import turnstream_server
from turnstream.store.client.scripts import Script


def script_files() -> dict[str, Path]:
    """Return name to file, of scripts and of their included parts."""
    files: dict[str, Path] = {}
    for package in (turnstream, turnstream_server):
        for path in Path(package.__path__[0]).rglob("lua/*.lua"):
            assert path.stem not in files, f"two scripts {path.stem}"
            files[path.stem] = path
    return files


def package_of(path: Path) -> str:
    """Return the package whose `lua` folder has this file."""
    parts = path.parts[:-2]
    start = max(i for i, part in enumerate(parts) if part in ("turnstream", "turnstream_server"))
    return ".".join(parts[start:])


def script(name: str) -> Script:
    """Return the script of this name, of whichever folder has it."""
    return Script(name, package_of(script_files()[name]))
