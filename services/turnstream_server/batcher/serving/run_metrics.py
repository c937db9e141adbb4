"""Metrics of the runs of a store, read when they are scraped, at a limited cost.

One read calls two scripts for each run, and reads the newest plan of some. Its values are kept for
some seconds, so that several readers cost as much as one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from turnstream.errors import TurnstreamError
from turnstream.store.client.connection import connect
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import run_commands
from turnstream.store.waits.read_waits import parse_waits, waits_command
from turnstream.store.waits.wait_reasons import reasons
from turnstream.store.waits.wait_snapshot import WaitSnapshot
from turnstream_server.batcher.planner.ingested import Ingested
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.bus.planning.manifests import read_plan
from turnstream_server.bus.queries.batch_numbers import BatchNumbers, numbers_of
from turnstream_server.bus.queries.ledger import LedgerCounts, ledger_command, parse_ledger
from turnstream_server.telemetry import declarations as declared
from turnstream_server.telemetry.declarations import Metric
from turnstream_server.telemetry.instruments import family
from turnstream_server.telemetry.log_counts import count_error

logger = logging.getLogger(__name__)

MAX_RUNS: Final = 50
"""Runs of one read."""

FRESH_S: Final = 5.0
"""Seconds for which the values of a read are served again."""

_ANSWER_S: Final = 2.0
_PAGE_RUNS: Final = 10
"""Runs of one round trip: their scripts run one after the other, and the store waits."""

_MAX_PLANS: Final = 8
"""Plans of one read: one of three thousand trajectories takes 30 ms to decode. Others follow in the
next reads."""

Samples = defaultdict[Metric, list[tuple[tuple[str, ...], float]]]


class _Batch(NamedTuple):
    """The newest batch of a run."""

    step: int
    numbers: BatchNumbers


class RunMetrics(Collector):
    """The metrics of at most `MAX_RUNS` runs.

    Args:
        url: the store.
        views: returns the views of the runs of this replica, the important ones first.
    """

    def __init__(self, url: str, views: Callable[[], Sequence[RunView]]) -> None:
        self._client = connect(url, num_retries=0, silent_s=_ANSWER_S)
        self._views = views
        self._lock = threading.Lock()
        self._read_s = -math.inf
        self._samples: Samples = defaultdict(list)
        self._batches: dict[str, _Batch] = {}

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield every metric that has a value."""
        with self._lock:
            if time.monotonic() - self._read_s >= FRESH_S:
                self._samples = self._read()
                self._read_s = time.monotonic()
            samples = self._samples
        for metric, values in samples.items():
            yield family(metric, values)

    def _read(self) -> Samples:
        samples: Samples = defaultdict(list)
        views = {view.run.name: view for view in reversed(self._views())}
        chosen = dict(list(reversed(views.items()))[:MAX_RUNS])
        samples[declared.RUNS_LEFT_OUT].append(((), len(views) - len(chosen)))
        try:
            self._read_runs(chosen, samples)
            self._read_store(samples)
        except TurnstreamError as error:
            logger.debug("metrics of runs cannot be read: %s", error)
            samples[declared.STORE_UP].append(((), 0))
        else:
            samples[declared.STORE_UP].append(((), 1))
        return samples

    def _read_runs(self, views: dict[str, RunView], samples: Samples) -> None:
        self._batches = {name: batch for name, batch in self._batches.items() if name in views}
        num_plans = _MAX_PLANS
        for page in _pages([*views.items()]):
            commands = [
                command
                for _, view in page
                for command in (waits_command(view.run), ledger_command(view.run))
            ]
            replies = run_commands(self._client, commands)
            for (name, view), waits, ledger in zip(page, replies[::2], replies[1::2], strict=True):
                try:
                    snapshot = parse_waits(view.run, _checked(waits))
                    counts = parse_ledger(view.run, _checked(ledger))
                    num_plans -= self._read_batch(name, view.run, snapshot, may_read=num_plans > 0)
                except TurnstreamError as error:  # the metrics of other runs stay
                    count_error(type(error), service="batcher")
                    logger.debug("metrics of run %s cannot be read: %s", view.run, error)
                    continue
                _add(samples, name, _of_run(snapshot))
                _add(samples, name, _of_groups(snapshot, view))
                _add(samples, name, _of_ledger(counts))
                _add(samples, name, _of_ingest(view.ingested))
                if name in self._batches:
                    _add(samples, name, _of_batch(self._batches[name].numbers, snapshot))

    def _read_batch(self, name: str, run: str, snapshot: WaitSnapshot, *, may_read: bool) -> bool:
        """Read the plan of the newest batch, unless it is known; return whether it was read."""
        known = self._batches.get(name)
        if not snapshot.planned:
            self._batches.pop(name, None)
            return False
        if not may_read or (known is not None and known.step == snapshot.planned):
            return False
        stored = read_plan(self._client, run, snapshot.planned)
        if stored is not None:
            self._batches[name] = _Batch(snapshot.planned, numbers_of(stored.manifest))
        return True

    def _read_store(self, samples: Samples) -> None:
        with translating():
            memory: Any = self._client.info("memory")
        samples[declared.STORE_BYTES].append(((), int(memory.get("used_memory", 0))))
        samples[declared.STORE_LIMIT_BYTES].append(((), int(memory.get("maxmemory", 0))))


_Value = tuple[Metric, tuple[str, ...], float | None]
"""A metric, the values of its labels after `run`, and its value; None for none."""


def _of_groups(snapshot: WaitSnapshot, view: RunView) -> Iterator[_Value]:
    """Yield the groups outside of batches, and why the run waits.

    The planner alone has the number of ready groups. Another replica has none of these metrics,
    unless the run has no planner. The reasons are those of a scanned ledger, as far as they follow
    without the scan.
    """
    if view.num_ready is None and snapshot.planner_left_s > 0:
        return
    num_ready = snapshot.num_ready if view.num_ready is None else view.num_ready
    num_waiting = max(0, snapshot.num_live - snapshot.planned_groups - num_ready)
    yield declared.GROUPS_WAITING, (), num_waiting
    yield declared.GROUPS_READY, (), num_ready
    found: defaultdict[str, int] = defaultdict(int)
    exact = replace(snapshot, is_scanned=True, num_ready=num_ready, num_waiting=num_waiting)
    for reason in reasons(exact):
        found[str(reason.kind)] += 1
    for kind, number in found.items():
        yield declared.WAIT_REASONS, (kind,), number


def _of_run(snapshot: WaitSnapshot) -> Iterator[_Value]:
    """Yield the progress and the bytes of a run."""
    budget = snapshot.budget
    yield declared.BATCHES_READY, (), max(0, snapshot.planned - snapshot.stepped)
    for state in ("planned", "stepped", "released"):
        yield declared.STEPS, (state,), getattr(snapshot, state)
    for part in ("reserved", "stored", "planned"):
        yield declared.RUN_BYTES, (part,), getattr(budget, part)
    yield declared.RUN_LIMIT_BYTES, (), snapshot.config.max_bytes
    yield declared.NEWEST_VERSION, (), snapshot.newest_version


def _of_ledger(counts: LedgerCounts) -> Iterator[_Value]:
    for state, number in counts.by_state.items():
        yield declared.TRAJECTORIES, (str(state),), number
    yield declared.ACCEPTED, (), counts.accepted
    yield declared.CONFLICTS, (), counts.num_conflicts
    yield declared.LATE_REWARDS, (), counts.num_late_rewards


def _of_ingest(ingested: Ingested) -> Iterator[_Value]:
    for outcome in ("sealed", "abandoned", "died"):
        yield declared.INGESTED_TRAJECTORIES, (outcome,), ingested.outcomes[outcome]
    yield declared.INGESTED_TURNS, (), ingested.num_turns
    yield declared.INGESTED_TOKENS, (), ingested.num_tokens
    yield declared.INGESTED_BYTES, (), ingested.num_bytes


def _of_batch(batch: BatchNumbers, snapshot: WaitSnapshot) -> Iterator[_Value]:
    yield declared.BATCH_TRAJECTORIES, (), batch.num_trajectories
    yield declared.BATCH_TOKENS, (), batch.num_tokens
    yield declared.PADDING_SHARE, (), batch.padding_share
    yield declared.MERGE_RATIO, (), batch.merge_ratio
    yield declared.REWARD_MEAN, (), batch.mean_reward
    if snapshot.newest_version is not None and batch.oldest_version is not None:
        staleness = snapshot.newest_version - batch.oldest_version
        yield declared.STALENESS, (), staleness if staleness >= 0 else None


def _add(samples: Samples, run: str, values: Iterable[_Value]) -> None:
    for metric, labels, value in values:
        if value is not None:
            samples[metric].append(((run, *labels), value))


def _checked(reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply


def _pages(
    views: Sequence[tuple[str, RunView]],
) -> Iterator[Sequence[tuple[str, RunView]]]:
    for start in range(0, len(views), _PAGE_RUNS):
        yield views[start : start + _PAGE_RUNS]
