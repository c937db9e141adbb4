"""The log of one process: a line is on disk before the process continues.

A process logs each call before it (`appending`) and after it (`appended`). So a missing line after
a kill leaves exactly the real doubt. Times are of the machine's monotonic clock, which all
processes share; the time of day is logged too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

_TICK_S = 0.1
_PAUSE_S = 0.7
"""A thread that sleeps a tenth of a second and wakes so late was not allowed to run."""

_ALIVE_S = 1.0


def parse_options(*required: str, **defaults: Any) -> argparse.Namespace:
    """Return the options of this process, `log` included; a type as default means none is given."""
    parser = argparse.ArgumentParser()
    for name in required:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--log", type=Path, required=True)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(default, type):
            parser.add_argument(option, type=default)
        else:
            parser.add_argument(option, type=type(default), default=default)
    return parser.parse_args()


class ProcessLog:
    """Appends lines to a file of this process; a context manager.

    A thread logs once a second that the process lives, and its memory. It also logs each pause of
    the process, which excuses a missed deadline.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._lock = threading.Lock()
        self._may_end = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self.usage: Callable[[], dict[str, int]] = dict
        """Gives what the process holds beside its memory; its owner replaces it."""

    def __enter__(self) -> Self:
        self.write("began", pid=os.getpid())
        self._pulse.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._may_end.set()
        self._pulse.join()
        self.write("ended", why="" if error is None else repr(error))
        os.close(self._file)

    def write(self, kind: str, **facts: Any) -> None:
        """Append a line and force it to disk."""
        moments = {"at": time.monotonic(), "wall_s": time.time()}
        line = json.dumps({"kind": kind, **moments, **facts})
        with self._lock:
            os.write(self._file, f"{line}\n".encode())
            os.fsync(self._file)

    @contextlib.contextmanager
    def waiting(self, what: str, *, deadline_s: float) -> Iterator[None]:
        """A wait that must end within `deadline_s`, by whatever error."""
        self.write("waiting", what=what, deadline_s=deadline_s)
        outcome = "interrupted"
        try:
            yield
            outcome = ""
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.write("waited", what=what, outcome=outcome)

    def _beat(self) -> None:
        last = told = time.monotonic()
        while not self._may_end.wait(_TICK_S):
            now = time.monotonic()
            if now - last > _PAUSE_S:
                self.write("paused", since=last, until=now)
            if now - told > _ALIVE_S:
                told = now
                self.write("alive", max_rss_bytes=_max_rss_bytes(), **self.usage())
            last = now


def _max_rss_bytes() -> int:
    """Return the peak memory of this program; `getrusage` would include the parent's."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024
