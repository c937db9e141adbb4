"""Metrics of a generator process, from the statistics of its publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from turnstream.generator import PublisherStatistics
from turnstream_server.telemetry.instruments import Family


class PublisherMetrics(Collector):
    """The statistics of a publisher as metrics.

    Args:
        service: "generator" or "replayer".
        read: returns the statistics.
    """

    def __init__(self, service: str, read: Callable[[], PublisherStatistics]) -> None:
        self._service = service
        self._read = read

    def collect(self) -> Iterator[Family]:
        """Yield each metric."""
        seen, prefix = self._read(), f"turnstream_{self._service}_"
        ended = CounterMetricFamily(
            f"{prefix}trajectories",
            "Trajectories that the store has, sealed or abandoned.",
            labels=["outcome"],
        )
        ended.add_metric(["sealed"], seen.num_trajectories)
        ended.add_metric(["abandoned"], seen.num_abandoned)
        yield ended
        for name, help_, value in (
            ("turns", "Turns that the store has.", seen.num_turns),
            ("tokens", "Prompt and response tokens of these turns.", seen.turn_tokens),
            ("sent_bytes", "Bytes of the records of these turns.", seen.wire_bytes),
            (
                "retries",
                "Calls that were repeated because the store was away or full.",
                seen.num_retries,
            ),
            ("wait_seconds", "Time of waiting for admission.", seen.wait_s),
        ):
            yield CounterMetricFamily(f"{prefix}{name}", help_, value=value)
        help_ = "Bytes that the store has not acknowledged."
        yield GaugeMetricFamily(f"{prefix}unacknowledged_bytes", help_, value=seen.inflight_bytes)
