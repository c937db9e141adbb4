"""Instruments of declared metrics, and the registry that `/metrics` shows.

A module makes its instruments once, at its top. Values that are read at a scrape come from a
Collector, which yields a `family`.

    _CALLS = counter(CALLS)
    _CALLS.labels("Get", "OK").inc()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from turnstream_server.telemetry.declarations import Metric

# The time at which each series began would double their number.
prometheus_client.disable_created_metrics()

REGISTRY: Final = CollectorRegistry()
"""The metrics of this process."""

ProcessCollector(registry=REGISTRY)

_Instrument = TypeVar("_Instrument", Counter, Gauge, Histogram)
_MADE: Final[dict[str, Any]] = {}


def counter(metric: Metric, *, service: str = "") -> Counter:
    """Return the counter of a metric; `service` is needed if several have it."""
    return _made(metric, Counter, service)


def gauge(metric: Metric, *, service: str = "") -> Gauge:
    """Return the gauge of a metric; `service` is needed if several have it."""
    return _made(metric, Gauge, service)


def histogram(metric: Metric, *, service: str = "") -> Histogram:
    """Return the histogram of a metric; `service` is needed if several have it."""
    return _made(metric, Histogram, service, buckets=metric.buckets)


def family(
    metric: Metric, samples: Iterable[tuple[tuple[str, ...], float]], *, service: str = ""
) -> GaugeMetricFamily | CounterMetricFamily:
    """Return a metric with its samples, each with the values of its labels."""
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    made = kind(_name(metric, service), metric.sentence, labels=metric.labels)
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


def _made(metric: Metric, kind: type[_Instrument], service: str, **options: Any) -> _Instrument:
    name = _name(metric, service)
    if name not in _MADE:
        _MADE[name] = kind(name, metric.sentence, metric.labels, registry=REGISTRY, **options)
    return _MADE[name]


def _name(metric: Metric, service: str) -> str:
    assert service in metric.services or (not service and len(metric.services) == 1)
    return metric.name(service or metric.services[0])
