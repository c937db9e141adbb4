"""Logs of the services: one line per event on standard error, a message and then its facts.

A line is a text, or a JSON object. The facts are those of `extra`, and those that are `bound` in
the block around it. `run`, `trajectory` and `step` have the same names everywhere, so that one
question finds all lines of a turn::

    jq 'select(.trajectory == "g7/0/0" or .step == 12)'
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

Format = Literal["text", "json"]

_OWN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

_VERBOSE = ("httpx2", "uvicorn")
"""Loggers with a line for each request; below WARNING they write only at level DEBUG."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that break a line, or change a terminal."""

_NO_FACTS: Final[Mapping[str, Any]] = {}
_bound: ContextVar[Mapping[str, Any]] = ContextVar("bound", default=_NO_FACTS)


def configure_logging(
    level: str, *, service: str, stream: TextIO | None = None, form: Format = "text"
) -> None:
    """Send the records of every logger, from `level` up, to `stream` (standard error).

    Another call replaces the earlier one. `service` is the name of this process in every line.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_JsonFormatter(service) if form == "json" else _LineFormatter(service))
    root = logging.getLogger()
    for old in root.handlers[:]:
        if _is_own(old):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in _VERBOSE:
        logging.getLogger(name).setLevel(logging.WARNING if level == "INFO" else level)


@contextlib.contextmanager
def bound(**facts: Any) -> Iterator[None]:
    """Add facts to every line of the block, and of the tasks that it starts."""
    token = _bound.set({**_bound.get(), **facts})
    try:
        yield
    finally:
        _bound.reset(token)


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
    return isinstance(handler.formatter, _LineFormatter | _JsonFormatter)


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    """Return the facts of a line; its own ones replace bound ones."""
    own = {name: value for name, value in record.__dict__.items() if name not in _OWN_FIELDS}
    return {**_bound.get(), **own}


class _LineFormatter(logging.Formatter):
    """`time LEVEL service logger: message key=value …`, on one line, and an indented traceback."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name there
        facts = (f"{name}={value}" for name, value in _facts(record).items())
        return _escaped(" ".join((super().formatMessage(record), *facts)))

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the lines of its traceback."""
        line, *traceback = super().format(record).split("\n")
        return "\n".join([line, *(f"    {_escaped(each)}" for each in traceback)])


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class _JsonFormatter(logging.Formatter):
    """One JSON object; a fact that has the name of another field gets the name `fact_<name>`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        taken = {*line, "exception"}
        for name, value in _facts(record).items():
            line[f"fact_{name}" if name in taken else name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(plain(line), default=str, separators=(",", ":"))


def plain(value: Any) -> Any:
    """Return a value with texts for numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value
