"""The metrics of every service but the trainer, each declared once.

A metric is a row of docs/metrics.md. A new one is one declaration; `tools/metrics_page.py` writes
the tables of the page. `trainer/reporting/declarations.py` has the metrics of the trainer.

No label has a group, a trajectory, a model or a key as its value: each value is a time series.
"""

from __future__ import annotations

import functools
from typing import Final, Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]

SERVICES: Final = ("batcher", "gateway", "trainer", "generator", "replayer", "engine", "sampler")
"""Every service, in the order of the page."""

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metric(NamedTuple):
    """One metric.

    Attributes:
        services: services that have it.
        what: middle of its name, which ends with the unit.
        kind: a "counter" counts since the start of the process.
        unit: "seconds", for example; "" for a pure number.
        sentence: meaning, for people.
        labels: names of its labels.
        buckets: upper limits of a histogram.
    """

    services: tuple[str, ...]
    what: str
    kind: Kind
    unit: str
    sentence: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def name(self, service: str) -> str:
        """Return the name in Prometheus.

        >>> Metric(("batcher",), "sent_bytes", "counter", "bytes", "").name("batcher")
        'turnstream_batcher_sent_bytes_total'
        """
        return f"turnstream_{service}_{self.what}{'_total' if self.kind == 'counter' else ''}"


METRICS: Final[list[Metric]] = []
"""Every metric of this module, in the order of the page."""


def _declare(
    services: str, what: str, kind: Kind, unit: str, sentence: str, labels: str = ""
) -> Metric:
    """Declare a metric; services and labels are separated by spaces."""
    buckets = _SECONDS if kind == "histogram" else ()
    metric = Metric(
        tuple(services.split()), what, kind, unit, sentence, tuple(labels.split()), buckets
    )
    METRICS.append(metric)
    return metric


_every = functools.partial(_declare, " ".join(SERVICES))
_batcher = functools.partial(_declare, "batcher")
_gateway = functools.partial(_declare, "gateway")
_generators = functools.partial(_declare, "generator replayer")
_generator = functools.partial(_declare, "generator")
_engine = functools.partial(_declare, "engine")
_sampler = functools.partial(_declare, "sampler")

DEPENDENCY_READY: Final = _every(
    "dependency_ready",
    "gauge",
    "",
    "1 if a dependency of /readyz is ready, 0 if not.",
    "dependency",
)
LOG_RECORDS: Final = _every(
    "log_records", "counter", "records", "Lines of the log from WARNING up.", "level"
)
ERRORS: Final = _every(
    "errors",
    "counter",
    "errors",
    "Errors of calls, and exceptions in the log, by their type.",
    "type",
)

CALLS: Final = _batcher("calls", "counter", "calls", "Calls of gRPC that have ended.", "call code")
CALL_SECONDS: Final = _batcher(
    "call_seconds", "histogram", "seconds", "Duration of a call of gRPC.", "call"
)
GET_WAIT_SECONDS: Final = _batcher(
    "get_wait_seconds",
    "histogram",
    "seconds",
    "Time from a Get to its planned batch, or to the answer that there is none.",
)
PULL_SECONDS: Final = _batcher(
    "pull_seconds",
    "histogram",
    "seconds",
    "Pull latency: time from a planned batch to the last byte of one rank's share.",
)
SENT_BYTES: Final = _batcher(
    "sent_bytes", "counter", "bytes", "Bytes of shares that were sent to ranks."
)
PLAN_SECONDS: Final = _batcher(
    "plan_seconds", "histogram", "seconds", "Time to plan, check and write a batch."
)
ASSEMBLY_SECONDS: Final = _batcher(
    "assembly_seconds", "histogram", "seconds", "Time to make the rows of a mini-batch."
)
CACHE_BYTES: Final = _batcher(
    "cache_bytes", "gauge", "bytes", "Bytes of assembled mini-batches in memory."
)
LED_RUNS: Final = _batcher("led_runs", "gauge", "runs", "Runs that this replica leads at present.")
LEADERSHIP_LAG: Final = _batcher(
    "leadership_lag_seconds",
    "gauge",
    "seconds",
    "Time since the leases of the led runs were renewed; 0 without led runs.",
)
STORE_UP: Final = _batcher(
    "store_up", "gauge", "", "1 if the metrics of runs could be read, 0 if not."
)
STORE_BYTES: Final = _batcher("store_bytes", "gauge", "bytes", "Memory that the store uses.")
STORE_LIMIT_BYTES: Final = _batcher(
    "store_limit_bytes",
    "gauge",
    "bytes",
    "Memory above which the store refuses writes; 0: no limit.",
)
RUNS_LEFT_OUT: Final = _batcher(
    "left_out_runs",
    "gauge",
    "runs",
    "Runs without metrics, because at most 50 have them.",
)

INGESTED_TRAJECTORIES: Final = _batcher(
    "ingested_trajectories",
    "counter",
    "trajectories",
    "Trajectories that ended at their generator: sealed, abandoned or died.",
    "run outcome",
)
INGESTED_TURNS: Final = _batcher(
    "ingested_turns", "counter", "turns", "Turns of sealed trajectories.", "run"
)
INGESTED_TOKENS: Final = _batcher(
    "ingested_tokens",
    "counter",
    "tokens",
    "Prompt and response tokens of the turns of sealed trajectories.",
    "run",
)
INGESTED_BYTES: Final = _batcher(
    "ingested_bytes", "counter", "bytes", "Bytes of the stored turns of sealed trajectories.", "run"
)
TRAJECTORIES: Final = _batcher(
    "trajectories", "gauge", "trajectories", "Trajectories of the ledger by state.", "run state"
)
ACCEPTED: Final = _batcher(
    "accepted_trajectories",
    "gauge",
    "trajectories",
    "Trajectories that were ever opened: the sum over the states.",
    "run",
)
CONFLICTS: Final = _batcher(
    "conflicts",
    "gauge",
    "",
    "Writes that were refused because their key has another content.",
    "run",
)
LATE_REWARDS: Final = _batcher(
    "late_rewards", "gauge", "rewards", "Rewards that came after their group was decided.", "run"
)
GROUPS_WAITING: Final = _batcher(
    "waiting_groups", "gauge", "groups", "Groups that are not decided.", "run"
)
GROUPS_READY: Final = _batcher(
    "ready_groups", "gauge", "groups", "Groups that are decided, and in no batch.", "run"
)
WAIT_REASONS: Final = _batcher(
    "wait_reasons",
    "gauge",
    "reasons",
    "Reasons why the run waits, by kind, as `turnstream why` has them.",
    "run kind",
)
STEPS: Final = _batcher(
    "step", "gauge", "", "Newest step that is planned, stepped, or released.", "run state"
)
BATCHES_READY: Final = _batcher(
    "ready_batches", "gauge", "batches", "Batches that are planned and not stepped.", "run"
)
RUN_BYTES: Final = _batcher(
    "run_bytes",
    "gauge",
    "bytes",
    "Bytes of the run in the store: reserved by open trajectories, stored, or planned.",
    "run part",
)
RUN_LIMIT_BYTES: Final = _batcher(
    "run_limit_bytes", "gauge", "bytes", "The setting `max_bytes`; 0: no limit.", "run"
)
NEWEST_VERSION: Final = _batcher(
    "newest_version", "gauge", "", "Newest announced policy version.", "run"
)
BATCH_TRAJECTORIES: Final = _batcher(
    "batch_trajectories", "gauge", "trajectories", "Trajectories of the newest batch.", "run"
)
BATCH_TOKENS: Final = _batcher(
    "batch_tokens", "gauge", "tokens", "Tokens of the rows of the newest batch.", "run"
)
PADDING_SHARE: Final = _batcher(
    "padding_share",
    "gauge",
    "",
    "Share of the positions of the newest batch that are padding.",
    "run",
)
MERGE_RATIO: Final = _batcher(
    "merge_ratio",
    "gauge",
    "",
    "Tokens of the separate turns / tokens of the rows, of the newest batch.",
    "run",
)
REWARD_MEAN: Final = _batcher(
    "reward_mean", "gauge", "", "Mean reward of the trajectories of the newest batch.", "run"
)
STALENESS: Final = _batcher(
    "staleness_versions",
    "gauge",
    "versions",
    "Versions between the newest announced one and the oldest that sampled the newest batch.",
    "run",
)

HTTP_REQUESTS: Final = _gateway(
    "http_requests",
    "counter",
    "requests",
    "Answered requests, by the template of their route.",
    "method route status",
)
HTTP_SECONDS: Final = _gateway(
    "http_request_seconds",
    "histogram",
    "seconds",
    "Duration of a request, with the time for which it was held.",
    "method route",
)
HTTP_BYTES: Final = _gateway(
    "http_received_bytes", "counter", "bytes", "Bytes of the bodies of requests."
)
GATEWAY_TRAJECTORIES: Final = _gateway(
    "ingested_trajectories",
    "counter",
    "trajectories",
    "Trajectories of requests that were sealed, abandoned, or refused.",
    "outcome",
)
GATEWAY_TURNS: Final = _gateway(
    "ingested_turns",
    "counter",
    "turns",
    "Turns of requests that were stored, or refused.",
    "outcome",
)
GATEWAY_TOKENS: Final = _gateway(
    "ingested_tokens",
    "counter",
    "tokens",
    "Prompt and response tokens of the stored turns of requests.",
)
COMMANDS_SUBMITTED: Final = _gateway(
    "commands", "counter", "commands", "Calls of hosted models that were submitted.", "kind"
)
HELD_POLLS: Final = _gateway(
    "held_polls", "gauge", "polls", "Polls of results that are held at present."
)

GENERATOR_TRAJECTORIES: Final = _generators(
    "trajectories",
    "counter",
    "trajectories",
    "Trajectories that the store has, sealed or abandoned.",
    "outcome",
)
GENERATOR_TURNS: Final = _generators("turns", "counter", "turns", "Turns that the store has.")
GENERATOR_TOKENS: Final = _generators(
    "tokens", "counter", "tokens", "Prompt and response tokens of these turns."
)
GENERATOR_BYTES: Final = _generators(
    "sent_bytes", "counter", "bytes", "Bytes of the records of these turns."
)
GENERATOR_RETRIES: Final = _generators(
    "retries", "counter", "retries", "Calls that were repeated because the store was away or full."
)
GENERATOR_WAIT_SECONDS: Final = _generators(
    "wait_seconds", "counter", "seconds", "Time of waiting for admission."
)
GENERATOR_BUFFERED_BYTES: Final = _generators(
    "unacknowledged_bytes", "gauge", "bytes", "Bytes that the store has not acknowledged."
)
GENERATOR_VERSION: Final = _generator(
    "version", "gauge", "", "Policy version that samples; -1 before the first."
)

ENGINE_COMMANDS: Final = _engine(
    "commands",
    "counter",
    "commands",
    "Commands of hosted models that were run; those that failed have the outcome `failed`.",
    "kind outcome",
)
ENGINE_COMMAND_SECONDS: Final = _engine(
    "command_seconds",
    "histogram",
    "seconds",
    "Time of commands that run together, with the turns of other models.",
    "kind",
)
ENGINE_WAITING: Final = _engine(
    "waiting_commands", "gauge", "commands", "Commands that wait, of all models of this worker."
)
ENGINE_MODELS: Final = _engine("models", "gauge", "models", "Hosted models of this worker.")

SAMPLES: Final = _sampler("samples", "counter", "samples", "Finished calls of sampling.", "outcome")
SAMPLE_SECONDS: Final = _sampler(
    "sample_seconds", "histogram", "seconds", "Time from the read of a call to its result."
)
SAMPLES_UNFINISHED: Final = _sampler(
    "unfinished_samples",
    "gauge",
    "samples",
    "Calls of sampling that were read and have no result in the store.",
)
