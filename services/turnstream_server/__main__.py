"""The program `turnstream`: quiet on Ctrl-C from its first line on, then the command line.

Ctrl-C ends the process at once with status 130. A KeyboardInterrupt would print a traceback while
modules are imported, or be swallowed by the module that is imported. Commands that have to clean
up handle Ctrl-C themselves (`cli.options.interruptible`).
"""

from __future__ import annotations

import atexit
import gc
import os
import signal

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it."""

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have it ignored
    signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(INTERRUPTED))


def main() -> None:
    """Run the command line."""
    # At its end the interpreter would visit every object of every module: 90 ms of CPU time.
    atexit.register(gc.freeze)
    from turnstream_server import cli

    cli.main()


if __name__ == "__main__":
    main()
