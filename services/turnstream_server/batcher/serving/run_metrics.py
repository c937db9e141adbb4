"""Metrics and readiness of a replica, and metrics of the runs of its store.

Metrics of runs are read when they are scraped, at a limited cost. One read calls two scripts for
each run, and reads the newest plan of some. Its values are kept for some seconds, so that several
readers cost as much as one.
"""

from __future__ import annotations

import contextlib
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
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.planner.renewal import LeadershipKeeper
from turnstream_server.batcher.planner.runs import Ingested, RunView
from turnstream_server.batcher.serving.health import StoreHealth
from turnstream_server.batcher.serving.registry import RunRegistry
from turnstream_server.ledger.planning.manifests import read_plan
from turnstream_server.ledger.queries.ledger import LedgerCounts, ledger_command, parse_ledger
from turnstream_server.ledger.queries.run_facts import BatchNumbers, numbers_of
from turnstream_server.telemetry.instruments import Family, collected, count_error, sampled
from turnstream_server.telemetry.readiness import Readiness

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


def _of_runs(what: str, help_: str, *labels: str, kind: type[Family] = GaugeMetricFamily) -> Family:
    return kind(f"turnstream_batcher_{what}", help_, labels=["run", *labels])


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
_STORE_UP = GaugeMetricFamily(
    "turnstream_batcher_store_up", "1 if the metrics of runs could be read, 0 if not."
)
_STORE_BYTES = GaugeMetricFamily("turnstream_batcher_store_bytes", "Memory that the store uses.")
_STORE_LIMIT_BYTES = GaugeMetricFamily(
    "turnstream_batcher_store_limit_bytes",
    "Memory above which the store refuses writes; 0: no limit.",
)
_RUNS_LEFT_OUT = GaugeMetricFamily(
    "turnstream_batcher_left_out_runs", "Runs without metrics, because at most 50 have them."
)
_INGESTED_TRAJECTORIES = _of_runs(
    "ingested_trajectories",
    "Trajectories that ended at their generator: sealed, abandoned or died.",
    "outcome",
    kind=CounterMetricFamily,
)
_INGESTED_TURNS = _of_runs(
    "ingested_turns", "Turns of sealed trajectories.", kind=CounterMetricFamily
)
_INGESTED_TOKENS = _of_runs(
    "ingested_tokens",
    "Prompt and response tokens of the turns of sealed trajectories.",
    kind=CounterMetricFamily,
)
_INGESTED_BYTES = _of_runs(
    "ingested_bytes", "Bytes of the stored turns of sealed trajectories.", kind=CounterMetricFamily
)
_TRAJECTORIES = _of_runs("trajectories", "Trajectories of the ledger by state.", "state")
_ACCEPTED = _of_runs(
    "accepted_trajectories", "Trajectories that were ever opened: the sum over the states."
)
_CONFLICTS = _of_runs(
    "conflicts", "Writes that were refused because their key has another content."
)
_LATE_REWARDS = _of_runs("late_rewards", "Rewards that came after their group was decided.")
_GROUPS_WAITING = _of_runs("waiting_groups", "Groups that are not decided.")
_GROUPS_READY = _of_runs("ready_groups", "Groups that are decided, and in no batch.")
_WAIT_REASONS = _of_runs(
    "wait_reasons", "Reasons why the run waits, by kind, as `turnstream why` has them.", "kind"
)
_STEPS = _of_runs("step", "Newest step that is planned, stepped, or released.", "state")
_BATCHES_READY = _of_runs("ready_batches", "Batches that are planned and not stepped.")
_RUN_BYTES = _of_runs(
    "run_bytes",
    "Bytes of the run in the store: reserved by open trajectories, stored, or planned.",
    "part",
)
_RUN_LIMIT_BYTES = _of_runs("run_limit_bytes", "The setting `max_bytes`; 0: no limit.")
_NEWEST_VERSION = _of_runs("newest_version", "Newest announced policy version.")
_BATCH_TRAJECTORIES = _of_runs("batch_trajectories", "Trajectories of the newest batch.")
_BATCH_TOKENS = _of_runs("batch_tokens", "Tokens of the rows of the newest batch.")
_PADDING_SHARE = _of_runs(
    "padding_share", "Share of the positions of the newest batch that are padding."
)
_MERGE_RATIO = _of_runs(
    "merge_ratio", "Tokens of the separate turns / tokens of the rows, of the newest batch."
)
_REWARD_MEAN = _of_runs("reward_mean", "Mean reward of the trajectories of the newest batch.")
_STALENESS = _of_runs(
    "staleness_versions",
    "Versions between the newest announced one and the oldest that sampled the newest batch.",
)

Families = dict[str, Family]
"""Metrics with a value, by their name."""


class _Batch(NamedTuple):
    step: int
    numbers: BatchNumbers


class RunMetrics(Collector):
    """The metrics of at most `MAX_RUNS` runs; `views` returns the important ones first."""

    def __init__(self, url: str, views: Callable[[], Sequence[RunView]]) -> None:
        self._client = connect(url, num_retries=0, silent_s=_ANSWER_S)
        self._views = views
        self._lock = threading.Lock()
        self._read_s = -math.inf
        self._families: Families = {}
        self._batches: dict[str, _Batch] = {}

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def collect(self) -> Iterator[Family]:
        """Yield every metric that has a value."""
        with self._lock:
            if time.monotonic() - self._read_s >= FRESH_S:
                self._families = self._read()
                self._read_s = time.monotonic()
            families = self._families
        yield from families.values()

    def _read(self) -> Families:
        families: Families = {}
        views = {view.run.name: view for view in reversed(self._views())}
        chosen = dict(list(reversed(views.items()))[:MAX_RUNS])
        _put(families, _RUNS_LEFT_OUT, len(views) - len(chosen))
        try:
            self._read_runs(chosen, families)
            self._read_store(families)
        except TurnstreamError as error:
            logger.debug("metrics of runs cannot be read: %s", error)
            _put(families, _STORE_UP, 0)
        else:
            _put(families, _STORE_UP, 1)
        return families

    def _read_runs(self, views: dict[str, RunView], families: Families) -> None:
        self._batches = {name: batch for name, batch in self._batches.items() if name in views}
        num_plans = _MAX_PLANS
        items = [*views.items()]
        for start in range(0, len(items), _PAGE_RUNS):
            page = items[start : start + _PAGE_RUNS]
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
                _add(families, name, _of_run(snapshot))
                _add(families, name, _of_groups(snapshot, view))
                _add(families, name, _of_ledger(counts))
                _add(families, name, _of_ingest(view.ingested))
                if name in self._batches:
                    _add(families, name, _of_batch(self._batches[name].numbers, snapshot))

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

    def _read_store(self, families: Families) -> None:
        with translating():
            memory: Any = self._client.info("memory")
        _put(families, _STORE_BYTES, int(memory.get("used_memory", 0)))
        _put(families, _STORE_LIMIT_BYTES, int(memory.get("maxmemory", 0)))


_Value = tuple[Family, tuple[str, ...], float | None]
"""A metric, the values of its labels after `run`, and its value; None for none."""


def _of_groups(snapshot: WaitSnapshot, view: RunView) -> Iterator[_Value]:
    """Yield the groups outside of batches, as the planner alone has them, and why the run waits."""
    if view.num_ready is None and snapshot.planner_left_s > 0:
        return
    num_ready = snapshot.num_ready if view.num_ready is None else view.num_ready
    num_waiting = max(0, snapshot.num_live - snapshot.planned_groups - num_ready)
    yield _GROUPS_WAITING, (), num_waiting
    yield _GROUPS_READY, (), num_ready
    found: defaultdict[str, int] = defaultdict(int)
    exact = replace(snapshot, is_scanned=True, num_ready=num_ready, num_waiting=num_waiting)
    for reason in reasons(exact):
        found[str(reason.kind)] += 1
    for kind, number in found.items():
        yield _WAIT_REASONS, (kind,), number


def _of_run(snapshot: WaitSnapshot) -> Iterator[_Value]:
    budget = snapshot.budget
    yield _BATCHES_READY, (), max(0, snapshot.planned - snapshot.stepped)
    for state in ("planned", "stepped", "released"):
        yield _STEPS, (state,), getattr(snapshot, state)
    for part in ("reserved", "stored", "planned"):
        yield _RUN_BYTES, (part,), getattr(budget, part)
    yield _RUN_LIMIT_BYTES, (), snapshot.config.max_bytes
    yield _NEWEST_VERSION, (), snapshot.newest_version


def _of_ledger(counts: LedgerCounts) -> Iterator[_Value]:
    for state, number in counts.by_state.items():
        yield _TRAJECTORIES, (str(state),), number
    yield _ACCEPTED, (), counts.accepted
    yield _CONFLICTS, (), counts.num_conflicts
    yield _LATE_REWARDS, (), counts.num_late_rewards


def _of_ingest(ingested: Ingested) -> Iterator[_Value]:
    for outcome in ("sealed", "abandoned", "died"):
        yield _INGESTED_TRAJECTORIES, (outcome,), ingested.outcomes[outcome]
    yield _INGESTED_TURNS, (), ingested.num_turns
    yield _INGESTED_TOKENS, (), ingested.num_tokens
    yield _INGESTED_BYTES, (), ingested.num_bytes


def _of_batch(batch: BatchNumbers, snapshot: WaitSnapshot) -> Iterator[_Value]:
    yield _BATCH_TRAJECTORIES, (), batch.num_trajectories
    yield _BATCH_TOKENS, (), batch.num_tokens
    yield _PADDING_SHARE, (), batch.padding_share
    yield _MERGE_RATIO, (), batch.merge_ratio
    yield _REWARD_MEAN, (), batch.mean_reward
    if snapshot.newest_version is not None and batch.oldest_version is not None:
        staleness = snapshot.newest_version - batch.oldest_version
        yield _STALENESS, (), staleness if staleness >= 0 else None


def _add(families: Families, run: str, values: Iterable[_Value]) -> None:
    for metric, labels, value in values:
        if value is not None:
            _put(families, metric, value, run, *labels)


def _put(families: Families, metric: Family, value: float, *labels: str) -> None:
    families.setdefault(metric.name, sampled(metric)).add_metric(labels, value)


def _checked(reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply


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
