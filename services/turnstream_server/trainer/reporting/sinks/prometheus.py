"""Metrics for Prometheus, over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from turnstream.errors import InvalidConfigError
from turnstream_server.options import split_address
from turnstream_server.trainer.reporting.declarations import Metric, numbers

logger = logging.getLogger(__name__)

OPTION: Final = "--metrics-listen"

DEFAULT_HOST: Final = "127.0.0.1"


class Prometheus(Collector):
    """Serves the newest values of one run, and those of the process, until it is closed.

    A gauge that the newest step lacks is absent. Counters begin at 0 with each process, so that a
    step that is trained again counts again.

    Attributes:
        port: on which it listens.
    """

    def __init__(self, address: str, *, run: str) -> None:
        """Listen on "host:port" or "port"; InvalidConfigError for an address in use."""
        self._run = run
        self._counters: dict[str, float] = {}
        self._values: dict[str, float] = {}
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)
        host, port = split_address(address, option=OPTION, default_host=DEFAULT_HOST)
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        except OSError as error:
            raise InvalidConfigError(OPTION, f"cannot listen on {host}:{port}: {error}") from error
        self.port: int = self._server.server_port
        logger.info("metrics are served", extra={"url": f"http://{host}:{self.port}/metrics"})

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
        """End the server and its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

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
