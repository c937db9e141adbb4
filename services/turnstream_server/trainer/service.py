"""The trainer as a process."""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import NoReturn

import torch
from transformers import PreTrainedModel

from turnstream.worker import BatchStream
from turnstream.worker.steps import Batches
from turnstream_server.models.policy import load_policy
from turnstream_server.models.recompute import recompute_layers
from turnstream_server.models.spec import PolicySource, read_policy_source
from turnstream_server.trainer.checkpoint import Checkpoints
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.loop import Trainer
from turnstream_server.trainer.objective import Objective

logger = logging.getLogger(__name__)


def run_trainer(config: TrainerConfig) -> None:
    """Train until the run ends, `max_steps` is reached or SIGTERM or SIGINT comes.

    The next trainer in the same folder begins at the newest complete checkpoint.
    """
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, _stop)
    try:
        train(config)
    except _Stopped:
        logger.info("trainer stopped by a signal")


def train(config: TrainerConfig) -> None:
    """Train until the run ends or `max_steps` is reached."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    checkpoints = Checkpoints(config.folder / "checkpoints")
    checkpoint = checkpoints.newest()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = checkpoint.folder if checkpoint else _first_policy(config)
    objective = config.objective
    model = load_policy(source, device=device)
    if config.gradient_checkpointing:
        recompute_layers(model)
    engine = Engine(
        model,
        adam=config.adam,
        schedule=config.rate_schedule,
        dtype=_dtype(config.dtype, device),
        layout="packed" if config.layout == "packed" else "padded",
        temperature=config.temperature,
        objective=Objective(objective),
        reference=None if objective.kl is None else _reference(config, device=device),
    )
    token, from_step = None, 0
    if checkpoint is not None:
        checkpoints.restore(checkpoint, engine)
        token, from_step = checkpoint.token, checkpoint.token.step
    logger.info("trainer starts after step %d on %s: %s", from_step, device, objective)
    stream = BatchStream(
        config.batcher_target, config.run, recovery_token=token, timeout_s=config.timeout_s
    )
    with Batches(stream) as batches:
        trainer = Trainer(engine, batches, config=config, checkpoints=checkpoints)
        trainer.train(from_step=from_step)


def _dtype(name: str, device: str) -> torch.dtype:
    """Return the type of the matrix products."""
    is_lower = name == "bfloat16" or (name == "auto" and device == "cuda")
    return torch.bfloat16 if is_lower else torch.float32


def _first_policy(config: TrainerConfig) -> PolicySource:
    if config.policy is not None:
        return read_policy_source(config.policy)
    assert config.small_model is not None
    return config.small_model


def _reference(config: TrainerConfig, *, device: str) -> PreTrainedModel:
    """Return the reference policy, without gradients: a folder, or the first policy."""
    source = config.reference or _first_policy(config)
    return load_policy(source, device=device).requires_grad_(False)


class _Stopped(BaseException):
    """A signal asked the process to stop."""


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    # Ignore further signals: they must not interrupt the clean-up.
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
    raise _Stopped
