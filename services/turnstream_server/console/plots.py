"""Metrics to plot: the file of a trainer, or the rewards of a run in the store."""

from __future__ import annotations

from typing import Any, NamedTuple

from turnstream.store.run.configs import open_run
from turnstream_server.console.store_client import store_client
from turnstream_server.ledger.queries.batch_facts import reward_curve
from turnstream_server.trainer.reporting.metrics_files import find_metrics
from turnstream_server.trainer.reporting.sinks.json_lines import read_steps


class StepMetrics(NamedTuple):
    """Metrics by step, in order, and the name of their source."""

    source: str
    steps: list[dict[str, Any]]


def read_metrics(source: str, *, redis_url: str) -> StepMetrics:
    """Return the metrics of a training.

    A run whose trainer has no file on this machine has its mean rewards alone, from the plans and
    the records of released batches.

    Args:
        source: folder of a trainer or of a job, a file of metrics, or a run.
        redis_url: store of the run.
    """
    path = find_metrics(source, redis_url=redis_url)
    if path is not None:
        return StepMetrics(str(path), read_steps(path))
    with store_client(redis_url) as client:
        steps = reward_curve(client, open_run(client, source))
    return StepMetrics(f"the batches of run {source}", steps)
