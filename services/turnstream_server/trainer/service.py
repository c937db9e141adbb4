"""The trainer as a process."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from turnstream.errors import InvalidConfigError
from turnstream.store.run.batchers import registered_batchers
from turnstream.worker import BatchStream
from turnstream.worker.launch import find_launch
from turnstream.worker.steps import Batches
from turnstream_server.telemetry.readiness import Readiness
from turnstream_server.trainer.building import build_engine
from turnstream_server.trainer.checkpoint import Checkpoint, Checkpoints
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.loop import Trainer
from turnstream_server.trainer.ranks import join_ranks
from turnstream_server.trainer.settings import Parallel
from turnstream_server.trainer.weights_server import WeightsAccess

logger = logging.getLogger(__name__)


def run_trainer(
    config: TrainerConfig,
    readiness: Readiness | None = None,
    weights_access: WeightsAccess | None = None,
) -> None:
    """Train until the run ends, `max_steps` is reached or SIGTERM or SIGINT comes.

    The next trainer in the same folder begins at the newest complete checkpoint. `weights_access`
    has the callers that get published weights over HTTP.

    Raises:
        SystemExit: one of several ranks was stopped by a signal; its status is 128 + the signal.
    """
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, _stop)
    try:
        train(config, readiness, weights_access)
    except _Stopped as stopped:
        logger.info("trainer stopped by %s", stopped.signal.name)
        if find_launch().dp_world_size > 1:
            # torchrun takes a status of 0 for a rank that has finished: the others would wait for
            # this one, in place of a restart.
            raise SystemExit(128 + stopped.signal) from None


def train(
    config: TrainerConfig,
    readiness: Readiness | None = None,
    weights_access: WeightsAccess | None = None,
) -> None:
    """Train until the run ends or `max_steps` is reached, as one of the ranks that torchrun starts.

    Without torchrun, the process is the only rank.
    """
    launch = find_launch()
    with join_ranks(launch, timeout_s=config.timeout_s + config.push_timeout_s) as ranks:
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        torch.manual_seed(config.seed)
        folder, keep = config.folder / "checkpoints", config.keep_checkpoints
        checkpoints = Checkpoints(folder, keep=keep, ranks=ranks)
        checkpoint = checkpoints.newest()
        engine = build_engine(config, checkpoint=_weights_folder(checkpoint, config), ranks=ranks)
        token, from_step = None, 0
        if checkpoint is not None:
            checkpoints.restore(checkpoint, engine)
            token, from_step = checkpoint.token, checkpoint.token.step
        if readiness is not None:
            readiness.reached("engine")
        critic = "" if config.critic is None else f" --critic {config.critic_config}"
        logger.info(
            "trainer starts after step %d as rank %d of %d on %s: %s%s",
            *(from_step, ranks.rank, ranks.world_size, ranks.device, config.objective, critic),
        )
        stream = BatchStream(
            config.batcher_target or registered_batchers(config.redis_url),
            config.run,
            launch.dp_rank,
            launch.dp_world_size,
            token,
            session=launch.session or None,
            timeout_s=config.timeout_s,
        )
        with Batches(stream) as batches:
            trainer = Trainer(
                engine,
                batches,
                config=config,
                checkpoints=checkpoints,
                ranks=ranks,
                weights_access=weights_access,
            )
            trainer.train(from_step=from_step)


def _weights_folder(checkpoint: Checkpoint | None, config: TrainerConfig) -> Path | None:
    """Return the folder of a model to begin with; None for the first policy."""
    if checkpoint is None:
        return None
    written: Parallel = "fsdp2" if checkpoint.is_sharded else "ddp"
    if written != config.parallel:
        message = f"{config.parallel}, but {checkpoint.folder} was written with {written}"
        raise InvalidConfigError("--parallel", f"{message}: resume with --parallel {written}")
    return None if checkpoint.is_sharded else checkpoint.folder


class _Stopped(BaseException):
    """A signal asked the process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    # Ignore further signals: they must not interrupt the clean-up.
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
    raise _Stopped(number)
