"""The sinks that the settings of a trainer ask for, as one that never raises."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

from turnstream.optional import from_extra
from turnstream_server.screen import Screen
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.reporting.declarations import undeclared
from turnstream_server.trainer.reporting.sinks.json_lines import FILE_NAME, JsonLines
from turnstream_server.trainer.reporting.sinks.live_table import LiveTable
from turnstream_server.trainer.reporting.sinks.prometheus import Prometheus
from turnstream_server.trainer.reporting.sinks.tensorboard import TensorBoard
from turnstream_server.trainer.reporting.sinks.wandb import Wandb

logger = logging.getLogger(__name__)


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
            with from_extra(package, needed_by=f"--{package}", distribution="turnstream-server"):
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
