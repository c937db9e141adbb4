"""Metrics and readiness of a batcher replica."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.planner.renewal import LeadershipKeeper
from turnstream_server.batcher.serving.health import StoreHealth
from turnstream_server.batcher.serving.registry import RunRegistry
from turnstream_server.batcher.serving.run_metrics import RunMetrics
from turnstream_server.telemetry.instruments import Family, collected, sampled
from turnstream_server.telemetry.readiness import Readiness

_LED_RUNS = GaugeMetricFamily(
    "turnstream_batcher_led_runs", "Runs that this replica leads at present."
)
_LEADERSHIP_LAG = GaugeMetricFamily(
    "turnstream_batcher_leadership_lag_seconds",
    "Time since the leases of the led runs were renewed; 0 without led runs.",
)
_CACHE_BYTES = GaugeMetricFamily(
    "turnstream_batcher_cache_bytes", "Bytes of assembled mini-batches in memory."
)


@contextlib.contextmanager
def observed_replica(
    url: str,
    readiness: Readiness,
    *,
    runs: RunRegistry,
    keeper: LeadershipKeeper,
    assembler: Assembler,
    health: StoreHealth,
) -> Iterator[None]:
    """Show the metrics of a replica in the block, and check its dependencies."""

    def leadership() -> str:
        lag_s = keeper.lag_s
        late = f"the leases of {keeper.num_terms} runs were not renewed for {lag_s:.0f} s"
        return late if lag_s > keeper.lease_s else ""

    readiness.add("store", lambda: health.trouble)
    readiness.add("leadership", leadership)
    with (
        contextlib.closing(RunMetrics(url, runs.views)) as of_runs,
        collected(of_runs),
        collected(_ReplicaMetrics(keeper, assembler)),
    ):
        yield


class _ReplicaMetrics(Collector):
    """Metrics whose values are there already."""

    def __init__(self, keeper: LeadershipKeeper, assembler: Assembler) -> None:
        self._keeper = keeper
        self._assembler = assembler

    def collect(self) -> Iterator[Family]:
        """Yield each metric."""
        yield sampled(_LED_RUNS, ([], self._keeper.num_terms))
        yield sampled(_LEADERSHIP_LAG, ([], self._keeper.lag_s))
        yield sampled(_CACHE_BYTES, ([], self._assembler.num_bytes))
