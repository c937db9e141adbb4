"""The registry that `/metrics` shows, and constructors of instruments in it.

A module makes its instruments once, at its top, with the full name and help text:

    _CALLS = counter("turnstream_batcher_calls", "Calls of gRPC that have ended.", ["call", "code"])
    _CALLS.labels("Get", "OK").inc()

Values that are read at a scrape come from a Collector, which yields metric families.
`tools/metrics_page.py` writes instruments and families into docs/metrics.md.

No label has a group, a trajectory, a model or a key as its value: each value is a time series.
"""

from __future__ import annotations

import contextlib
import copy
import functools
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
