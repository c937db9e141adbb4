"""Runs a module as the next minor release would: every turn, event and manifest has a field more.

::

    python -m harness.newer turnstream_server.cli serve batcher --listen ...

The field is one that this release does not know; to read it back is what is tested.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from turnstream.records import encoding

UNKNOWN_FIELD = b"\xfa\x3e\x05newer"
"""Number 1007 of protobuf's wire format, five bytes."""

_WITH_FIELDS = frozenset({encoding.TURN, encoding.EVENT, encoding.MANIFEST})
_write_frame = encoding.write_frame


def write_newer_frame(
    kind: bytes, header: bytes, body: Iterable[NDArray[Any]] = (), **options: Any
) -> bytes:
    more = UNKNOWN_FIELD if kind in _WITH_FIELDS else b""
    return _write_frame(kind, header + more, body, **options)


if __name__ == "__main__":
    encoding.write_frame = write_newer_frame  # before any codec takes it from there
    module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
