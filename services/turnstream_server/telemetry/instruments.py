"""The registry that `/metrics` shows, and constructors of instruments in it.

A module makes its instruments once, at its top, with the full name and help text:

    _CALLS = counter("turnstream_batcher_calls", "Calls of gRPC that have ended.", ["call", "code"])
    _CALLS.labels("Get", "OK").inc()

Values that are read at a scrape come from a Collector, which yields metric families.
`tools/metrics_page.py` writes instruments and families into docs/metrics.md.

No label has a group, a trajectory, a model or a key as its value: each value is a time series.
Every service counts its errors, and the lines of its log from WARNING up.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

# The time at which each series began would double their number.
prometheus_client.disable_created_metrics()

REGISTRY: Final = CollectorRegistry()
"""The metrics of this process."""

ProcessCollector(registry=REGISTRY)

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

counter: Final = functools.partial(Counter, registry=REGISTRY)
gauge: Final = functools.partial(Gauge, registry=REGISTRY)
histogram: Final = functools.partial(Histogram, registry=REGISTRY, buckets=_SECONDS)

Family = CounterMetricFamily | GaugeMetricFamily
"""A metric whose samples a Collector adds at a scrape; a module declares it without any."""


def sampled(declared: Family, *samples: tuple[Sequence[str], float]) -> Family:
    """Return a declared family with these samples, each with the values of its labels.

    >>> sampled(GaugeMetricFamily("depth", "Depth.", labels=["run"]), (["r"], 2)).samples[0].value
    2
    """
    made = copy.copy(declared)
    made.samples = []
    for labels, value in samples:
        made.add_metric(labels, value)
    return made


@contextlib.contextmanager
def collected(collector: Collector) -> Iterator[None]:
    """Show the metrics of a collector in the block."""
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)


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
