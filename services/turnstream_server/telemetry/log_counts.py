"""Counts of errors, and of the lines of the log from WARNING up."""

from __future__ import annotations

import logging

from turnstream_server.telemetry.declarations import ERRORS, LOG_RECORDS
from turnstream_server.telemetry.instruments import counter


class LogCounts(logging.Handler):
    """Counts the lines of the log, and the exceptions in them."""

    def __init__(self, *, service: str) -> None:
        super().__init__(logging.WARNING)
        self._records = counter(LOG_RECORDS, service=service)
        self._service = service

    def emit(self, record: logging.LogRecord) -> None:
        """Count a line."""
        self._records.labels(record.levelname).inc()
        if record.exc_info and record.exc_info[0] is not None:
            count_error(record.exc_info[0], service=self._service)


def count_error(kind: type[BaseException], *, service: str) -> None:
    """Count an error that is not in the log."""
    counter(ERRORS, service=service).labels(kind.__name__).inc()
