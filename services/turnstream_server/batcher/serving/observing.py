"""Metrics and readiness of a batcher replica."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.planner.renewal import LeadershipKeeper
from turnstream_server.batcher.serving.health import StoreHealth
from turnstream_server.batcher.serving.registry import RunRegistry
from turnstream_server.batcher.serving.run_metrics import RunMetrics
from turnstream_server.telemetry.declarations import CACHE_BYTES, LEADERSHIP_LAG, LED_RUNS
from turnstream_server.telemetry.instruments import collected, family
from turnstream_server.telemetry.readiness import Readiness


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

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield each metric."""
        yield family(LED_RUNS, [((), self._keeper.num_terms)])
        yield family(LEADERSHIP_LAG, [((), self._keeper.lag_s)])
        yield family(CACHE_BYTES, [((), self._assembler.num_bytes)])
