"""Counts of errors, and of the lines of the log from WARNING up."""

from __future__ import annotations

import functools
import logging

from prometheus_client import Counter

from turnstream_server.telemetry.instruments import counter


class LogCounts(logging.Handler):
    """Counts the lines of the log, and the exceptions in them."""

    def __init__(self, *, service: str) -> None:
        super().__init__(logging.WARNING)
        self._records = log_records(service)
        self._service = service

    def emit(self, record: logging.LogRecord) -> None:
        """Count a line."""
        self._records.labels(record.levelname).inc()
        if record.exc_info and record.exc_info[0] is not None:
            count_error(record.exc_info[0], service=self._service)


def count_error(kind: type[BaseException], *, service: str) -> None:
    """Count an error that is not in the log."""
    errors(service).labels(kind.__name__).inc()


@functools.cache
def log_records(service: str) -> Counter:
    """Return the counter of log lines of a service."""
    help_ = "Lines of the log from WARNING up."
    return counter(f"turnstream_{service}_log_records", help_, ["level"])


@functools.cache
def errors(service: str) -> Counter:
    """Return the counter of errors of a service."""
    help_ = "Errors of calls, and exceptions in the log, by their type."
    return counter(f"turnstream_{service}_errors", help_, ["type"])
