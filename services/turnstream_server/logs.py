"""Logs of the services: one line per event on standard error, a message and then its facts."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TextIO

_OWN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

_VERBOSE = ("httpx2", "uvicorn")
"""Loggers with a line for each request; below WARNING they write only at level DEBUG."""


def configure_logging(level: str, *, service: str, stream: TextIO | None = None) -> None:
    """Send the records of every logger, from `level` up, to `stream` (standard error).

    Another call replaces the earlier one. `service` is the name of this process in every line.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_LineFormatter(service))
    root = logging.getLogger()
    for old in root.handlers[:]:
        if _is_own(old):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in _VERBOSE:
        logging.getLogger(name).setLevel(logging.WARNING if level == "INFO" else level)


@contextlib.contextmanager
def log_to(stream: TextIO) -> Iterator[None]:
    """Send the log that `configure_logging` set up to another stream in the block."""
    own = [each for each in logging.getLogger().handlers if _is_own(each)]
    with contextlib.ExitStack() as before:
        for handler in own:
            assert isinstance(handler, logging.StreamHandler)
            before.callback(handler.setStream, handler.stream)
            handler.setStream(stream)
        yield


def _is_own(handler: logging.Handler) -> bool:
    return isinstance(handler.formatter, _LineFormatter)


class _LineFormatter(logging.Formatter):
    """`time LEVEL service logger: message key=value …`, the keys from `extra`."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name there
        facts = (
            f"{name}={value}" for name, value in record.__dict__.items() if name not in _OWN_FIELDS
        )
        return " ".join((super().formatMessage(record), *facts))
