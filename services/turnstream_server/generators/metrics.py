"""Metrics of a generator process, from the statistics of its publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from turnstream.generator import PublisherStatistics
from turnstream_server.telemetry import declarations as declared
from turnstream_server.telemetry.declarations import Metric
from turnstream_server.telemetry.instruments import family


class PublisherMetrics(Collector):
    """The statistics of a publisher as metrics.

    Args:
        service: "generator" or "replayer".
        read: returns the statistics.
    """

    def __init__(self, service: str, read: Callable[[], PublisherStatistics]) -> None:
        self._service = service
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield each metric."""
        seen = self._read()
        ended = [(("sealed",), seen.num_trajectories), (("abandoned",), seen.num_abandoned)]
        yield family(declared.GENERATOR_TRAJECTORIES, ended, service=self._service)
        values: tuple[tuple[Metric, float], ...] = (
            (declared.GENERATOR_TURNS, seen.num_turns),
            (declared.GENERATOR_TOKENS, seen.turn_tokens),
            (declared.GENERATOR_BYTES, seen.wire_bytes),
            (declared.GENERATOR_RETRIES, seen.num_retries),
            (declared.GENERATOR_WAIT_SECONDS, seen.wait_s),
            (declared.GENERATOR_BUFFERED_BYTES, seen.inflight_bytes),
        )
        for metric, value in values:
            yield family(metric, [((), value)], service=self._service)
