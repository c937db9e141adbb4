"""Make a service end with the process that started it, even where that was killed outright."""

from __future__ import annotations

import os
import signal
import threading

_GRACE_S = 5.0


def end_when_stdin_closes() -> None:
    """Ask this process to end (SIGTERM) once its standard input ends; end it 5 s later anyway.

    The supervisor holds the only write end of that pipe and writes nothing, so its death, of
    whatever kind, is the end of the input. The grace is bounded because a clean stop may be
    waiting for a store that went with the supervisor.
    """
    threading.Thread(target=_watch, name="orphan-watch", daemon=True).start()


def _watch() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_GRACE_S)
    os._exit(1)
