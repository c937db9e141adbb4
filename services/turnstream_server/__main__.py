"""The program `turnstream`: quiet on Ctrl-C from its first line on, then the command line.

Little is imported here before the handler is set. While modules are
imported there is nothing to clean up, so Ctrl-C ends the process at once with status 130. Raising
KeyboardInterrupt there would print a traceback, or be swallowed by the module that is imported.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it."""

_IMPORT_SYSTEM = "<frozen importlib"


def main() -> None:
    """Run the command line; Ctrl-C ends it with status 130 and without a traceback."""
    from turnstream_server import cli

    try:
        _replace(_leave, _raise_unless_importing)
        cli.main()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        _replace(_raise_unless_importing, _leave)  # the interpreter prints tracebacks as it ends


def _leave(_number: int, _frame: FrameType | None) -> None:
    """End the process without unwinding anything."""
    os._exit(INTERRUPTED)


def _raise_unless_importing(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; end the process if a module is being imported."""
    caller = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith(_IMPORT_SYSTEM):
            _leave(number, frame)
        caller = caller.f_back
    raise KeyboardInterrupt


def _replace(before: object, after: object) -> None:
    """Handle Ctrl-C by `after` if it is handled by `before`; a shell may have it ignored."""
    if signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, after)  # pyright: ignore[reportArgumentType]


_replace(signal.default_int_handler, _leave)

if __name__ == "__main__":
    main()
