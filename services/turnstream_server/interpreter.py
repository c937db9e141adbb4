"""The interpreter of a service process: its lock, its garbage collector and its free memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Final

SWITCH_INTERVAL_S: Final = 0.0005
"""A thread that computes gives the lock to the loop after so long. The loop gives it away with each
call to the system: at the usual 5 ms, an iteration that makes ten of them takes 50 ms."""

YOUNG_OBJECTS: Final = 5_000
"""New objects that make the collector run. A trajectory is some forty objects from its event to its
plan, none of them in a cycle: at the usual 700 it runs for every 20 trajectories and finds nothing,
at 20,000 it stops the loop for 10 ms on a busy machine."""

_YOUNG_ROUNDS: Final = 4
_MIDDLE_ROUNDS: Final = 500
"""A full collection looks through every trajectory of every run that waits for its batch."""


def tune_process() -> None:
    """Set the interpreter up for a responsive event loop, once everything is loaded.

    The loop shares one interpreter lock with the threads that compute, and one garbage collector.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Loaded modules stay: a full collection that scans them stops the event loop for 30 ms.
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, _YOUNG_ROUNDS, _MIDDLE_ROUNDS)


def return_free_memory() -> None:
    """Return free memory to the system; other C libraries than glibc keep it.

    glibc returns the end of the heap by itself. Free memory below a block that is in use stays with
    the process: after large bodies, that is most of it. It takes about 1 ms of CPU time under load.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
