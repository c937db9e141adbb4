"""Metrics for Prometheus, which the listener of the process serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from turnstream_server.telemetry.instruments import REGISTRY
from turnstream_server.trainer.reporting.declarations import Metric, numbers


class Prometheus(Collector):
    """Shows the newest values of one run among the metrics of the process, until it is closed.

    A gauge that the newest step lacks is absent. Counters begin at 0 with each process, so that a
    step that is trained again counts again.
    """

    def __init__(self, *, run: str) -> None:
        self._run = run
        self._counters: dict[str, float] = {}
        self._values: dict[str, float] = {}
        REGISTRY.register(self)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Replace the gauges, and add to the counters."""
        values = {
            metric.name: value + (self._counters.get(metric.name, 0.0) if is_counter(metric) else 0)
            for metric, value in numbers(metrics)
        }
        counters = {metric.name: value for metric, value in numbers(values) if is_counter(metric)}
        self._counters = {**self._counters, **counters}
        self._values = {**self._counters, **values}

    def close(self) -> None:
        """Show the values no more."""
        REGISTRY.unregister(self)

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Yield each metric with its value, labelled with the run."""
        for metric, value in numbers(self._values):
            family = CounterMetricFamily if is_counter(metric) else GaugeMetricFamily
            made = family(metric.prometheus_name, metric.sentence, labels=["run"])
            made.add_metric([self._run], value)
            yield made


def is_counter(metric: Metric) -> bool:
    """Return whether the values of the steps are added up."""
    return metric.kind == "counter"
