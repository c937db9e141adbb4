"""Metrics of a worker of hosted models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from turnstream.errors import TurnstreamError
from turnstream.store.client.connection import connect
from turnstream_server.operations.log import num_waiting
from turnstream_server.telemetry.instruments import Family, counter, histogram, sampled

OPERATIONS = counter(
    "turnstream_engine_commands",
    "Operations of hosted models that were run; those that failed have the outcome `failed`.",
    ["kind", "outcome"],
)
OPERATION_SECONDS = histogram(
    "turnstream_engine_command_seconds",
    "Time of operations that run together, with the turns of other models.",
    ["kind"],
)
_MODELS = GaugeMetricFamily("turnstream_engine_models", "Hosted models of this worker.")
_WAITING = GaugeMetricFamily(
    "turnstream_engine_waiting_commands", "Operations that wait, of all models of this worker."
)

_ANSWER_S: Final = 2.0
_MAX_MODELS: Final = 1_000
"""Models whose waiting operations are counted."""


class EngineMetrics(Collector):
    """Counts the models of a worker, and their operations that wait."""

    def __init__(self, url: str, models: Callable[[], Sequence[str]]) -> None:
        self._client = connect(url, num_retries=0, silent_s=_ANSWER_S)
        self._models = models

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def collect(self) -> Iterator[Family]:
        """Yield each metric that has a value."""
        models = self._models()
        yield sampled(_MODELS, ([], len(models)))
        with contextlib.suppress(TurnstreamError):  # /readyz says that the store is away
            yield sampled(_WAITING, ([], num_waiting(self._client, models[:_MAX_MODELS])))
