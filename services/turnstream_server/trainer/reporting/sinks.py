"""Receivers of the metrics of a training, and all of them as one that never raises."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import secrets
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol, Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from turnstream.errors import InvalidConfigError
from turnstream.optional import from_extra
from turnstream_server.logs import log_to
from turnstream_server.screen import Screen, make_table
from turnstream_server.telemetry.instruments import REGISTRY
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.reporting.declarations import BY_NAME, Metric, numbers, undeclared

logger = logging.getLogger(__name__)

COLUMNS: Final = {
    "step": "step",
    "reward_mean": "reward",
    "loss": "loss",
    "kl": "KL",
    "clipped_share": "clipped",
    "staleness": "stale",
    "padding_share": "padding",
    "trained_tokens_per_s": "tokens/s",
    "wait_s": "wait s",
    "step_s": "step s",
}
"""Title of the column of each metric that is shown."""

NUM_STEPS: Final = 10

_LOOK: Final[dict[str, Any]] = {"box": SIMPLE_HEAD, "padding": 0}
"""Without borders, so that the columns fit into 80 characters."""


class LiveTable:
    """Shows the last ten steps of a run in place; lines of the log appear above the table.

    The last table stays when it is closed.
    """

    def __init__(self, console: Console, *, run: str) -> None:
        self._run = run
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=NUM_STEPS)
        self._opened = ExitStack()
        self._live = self._opened.enter_context(Live(console=console, auto_refresh=False))
        self._opened.enter_context(log_to(sys.stderr))  # which `Live` has replaced

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the step, in place of the oldest one."""
        self._steps.append(metrics)
        self._live.update(steps_table(self._run, self._steps), refresh=True)

    def close(self) -> None:
        """End the display, and send the log where it went before."""
        self._opened.close()


def steps_table(run: str, steps: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each step."""
    rows = [[short(metrics.get(name)) for name in COLUMNS] for metrics in steps]
    table = make_table([*COLUMNS.values()], rows, title=run, title_justify="left", **_LOOK)
    for column in table.columns:
        column.justify = "right"
    return table


def short(value: float | None) -> str:
    """Return a number with three digits, or more before its point; "" for None.

    >>> [short(each) for each in (12, 12_345.6, 0.012345, -0.5, None)]
    ['12', '12,346', '0.0123', '-0.5', '']
    """
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1_000 else f"{value:.3g}"


FILE_NAME: Final = "metrics.jsonl"
"""Name of the JSON lines in the folder of a trainer."""

_DISTRIBUTION: Final = "turnstream-server"
_WANDB_ID_FILE: Final = "wandb-id"


class Sink(Protocol):
    """Receives the metrics of each step.

    After a restart, the steps after the checkpoint come again. A sink shows their later values.
    """

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step; numbers are finite."""
        ...

    def close(self) -> None:
        """Write what is pending, and release files and ports."""
        ...


class Sinks:
    """Several sinks as one, which never raises: training continues without a sink that fails.

    The first failure of each sink is logged. The sink is tried again at the next step.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._failed: set[int] = set()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step in every sink; numbers that are not finite become null.

        A metric that is not declared is a warning.
        """
        if names := undeclared(metrics):
            warnings.warn(f"metrics that are not declared: {', '.join(names)}", stacklevel=2)
        finite = {name: _finite(value) for name, value in metrics.items()}
        self._call_each(lambda sink: sink.write(step, finite))

    def close(self) -> None:
        """Close every sink."""
        self._call_each(lambda sink: sink.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call_each(self, call: Callable[[Sink], None]) -> None:
        for number, sink in enumerate(self._sinks):
            try:
                call(sink)
            except Exception:  # training is worth more than its metrics
                if number not in self._failed:
                    self._failed.add(number)
                    logger.exception("%s fails; training continues", type(sink).__name__)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require_packages(config: TrainerConfig) -> None:
    """Raise MissingExtraError if the package of a wanted sink is not installed."""
    for package, is_wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb)):
        if is_wanted:
            with from_extra(package, needed_by=f"--{package}", distribution=_DISTRIBUTION):
                importlib.import_module(package)


@contextlib.contextmanager
def open_sinks(config: TrainerConfig, *, from_step: int) -> Iterator[Sinks]:
    """Yield the sinks of a trainer, closed after the block. One rank of a trainer opens them.

    JSON lines are always written. The live table is shown if the standard output is a terminal.

    `from_step` is the last step in the weights; 0 before the first.

    Raises:
        MissingExtraError, InvalidConfigError: a wanted sink cannot be opened.
    """
    opened: list[Sink] = []
    with Sinks(opened) as sinks:
        for sink in _wanted(config, from_step=from_step):
            opened.append(sink)  # noqa: PERF402 - the next one may fail, and this one be closed
        yield sinks


def _wanted(config: TrainerConfig, *, from_step: int) -> Iterator[Sink]:
    yield JsonLines(config.folder / FILE_NAME)
    if config.metrics_listen:
        yield Prometheus(run=config.run)
    if config.tensorboard:
        yield TensorBoard(config.folder / "tensorboard", from_step=from_step)
    if config.wandb:
        yield Wandb(config.wandb, run=config.run, folder=config.folder)
    screen = Screen()
    if screen.is_terminal:
        yield LiveTable(screen, run=config.run)


class JsonLines:
    """Appends lines to a file; a line that a crash interrupted is closed, not continued."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            self._append("\n")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line; `metrics` has the step."""
        self._append(json.dumps(metrics) + "\n")

    def close(self) -> None:
        """Do nothing: each line is written at once."""

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step, in order; [] for a file without complete lines.

    After a restart, a line ends the lines before it from its step on. An incomplete line does not
    count.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            metrics = json.loads(line)
            step = metrics["step"]
        except (ValueError, KeyError, TypeError):
            continue
        steps = {number: each for number, each in steps.items() if number < step}
        steps[step] = metrics
    return list(steps.values())


class Prometheus(Collector):
    """Shows the newest values of one run among the metrics of the process, until it is closed.

    A gauge that the newest step lacks is absent. Counters begin at 0 with each process, so that a
    step that is trained again counts again.
    """

    def __init__(self, *, run: str) -> None:
        self._run = run
        self._counters: dict[str, float] = {}
        self._values: dict[str, float] = {}
        REGISTRY.register(self)

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
        """Show the values no more."""
        REGISTRY.unregister(self)

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


class TensorBoard:
    """Writes event files to a folder; each step is on disk when `write` returns.

    Args:
        folder: receives one file for each start of the trainer.
        from_step: last step in the weights; TensorBoard drops the values of later steps that an
            earlier start has written.

    Raises:
        MissingExtraError: the package is not installed.
    """

    def __init__(self, folder: Path, *, from_step: int) -> None:
        with from_extra("tensorboard", needed_by="--tensorboard", distribution=_DISTRIBUTION):
            from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=from_step + 1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a scalar for each number."""
        for metric, value in numbers(metrics):
            self._writer.add_scalar(metric.tag, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Wandb:
    """Logs to one run of wandb, which a restart in the same folder resumes.

    The environment of wandb applies: `WANDB_MODE=offline` writes to the folder alone. The step of
    the trainer is the axis of the charts. A step that is trained again has a second point there;
    the summary has the later value.

    Args:
        project: in wandb.
        run: name of the run in wandb.
        folder: receives the files of wandb, and the id of its run.

    Raises:
        MissingExtraError: the package is not installed.
        InvalidConfigError: wandb refuses to start, such as without a login.
    """

    def __init__(self, project: str, *, run: str, folder: Path) -> None:
        with from_extra("wandb", needed_by="--wandb", distribution=_DISTRIBUTION):
            import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=run,
                id=_run_id(folder),
                resume="allow",
                dir=folder,
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise InvalidConfigError("--wandb", f"wandb does not start: {error}") from error
        logger.info("metrics go to wandb", extra={"id": self._run.id, "folder": str(folder)})
        self._run.define_metric("*", step_metric=BY_NAME["step"].tag)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log each number."""
        self._run.log({metric.tag: value for metric, value in numbers(metrics)})

    def close(self) -> None:
        """Send or write what is pending."""
        self._run.finish()


def _run_id(folder: Path) -> str:
    """Return the id in a folder; the first call makes one."""
    path = folder / _WANDB_ID_FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(8), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
