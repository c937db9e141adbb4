"""The sinks that the settings of a trainer ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from turnstream_server.screen import Screen
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.reporting.sinks.json_lines import FILE_NAME, JsonLines
from turnstream_server.trainer.reporting.sinks.live_table import LiveTable
from turnstream_server.trainer.reporting.sinks.prometheus import Prometheus
from turnstream_server.trainer.reporting.sinks.sink import Sink, Sinks
from turnstream_server.trainer.reporting.sinks.tensorboard import TensorBoard
from turnstream_server.trainer.reporting.sinks.wandb import Wandb


@contextlib.contextmanager
def open_sinks(config: TrainerConfig, *, from_step: int) -> Iterator[Sinks]:
    """Yield the sinks of a trainer, closed after the block. One rank of a trainer opens them.

    JSON lines are always written. The live table is shown if the standard output is a terminal.

    Args:
        config: settings of the trainer.
        from_step: last step in the weights; 0 before the first.

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
