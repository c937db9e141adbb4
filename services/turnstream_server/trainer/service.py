"""The trainer as a process, and the engine that it trains with."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from turnstream.errors import InvalidConfigError
from turnstream.store.run.batchers import registered_batchers
from turnstream.worker.launch import find_launch
from turnstream.worker.steps import Batches
from turnstream.worker.stream import BatchStream
from turnstream_server.models.folders import is_adapter_folder
from turnstream_server.models.logprobs import head_is_linear
from turnstream_server.models.packed import enable_packing
from turnstream_server.models.policy import (
    ADAPTER,
    load_adapter,
    load_policy,
    recompute_layers,
    save_policy,
)
from turnstream_server.models.sharding import shard
from turnstream_server.models.spec import PolicySource, SmallModelSpec, read_policy_source
from turnstream_server.telemetry.readiness import Readiness
from turnstream_server.trainer.checkpoint import Checkpoint, Checkpoints
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.critic.critic import Critic, ValueModel
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.loop import Trainer
from turnstream_server.trainer.objectives.objective import Objective
from turnstream_server.trainer.publishing import WeightsAccess
from turnstream_server.trainer.ranks import ONE_RANK, Ranks, join_ranks
from turnstream_server.trainer.settings import Parallel

if TYPE_CHECKING:
    from turnstream_server.models.adapters import Adapter

logger = logging.getLogger(__name__)


def build_engine(
    config: TrainerConfig, *, checkpoint: Path | None = None, ranks: Ranks = ONE_RANK
) -> Engine:
    """Return an engine with the weights of a checkpoint, or with the first ones.

    All ranks call it, with the same checkpoint.

    Raises:
        InvalidConfigError: the weights do not load, or are those of another kind of training.
    """
    # Each layer is moved to the device of the rank as it is sharded: none has the whole model.
    device = "cpu" if config.parallel == "fsdp2" else ranks.device
    is_cuda = ranks.device.startswith("cuda")
    is_lower = config.dtype == "bfloat16" or (config.dtype == "auto" and is_cuda)
    dtype = torch.bfloat16 if is_lower else torch.float32
    if config.adapter is None:
        model, adapter = _load_all(checkpoint or _first_policy(config), device=device), None
    else:
        adapter = _make_adapter(config, checkpoint, ranks=ranks, device=device, dtype=dtype)
        model = adapter.model
    if config.gradient_checkpointing:
        recompute_layers(model)
    reference = _reference(config, device=device)
    for each in (model, reference):
        _place(each, config, ranks=ranks)
    return Engine(
        model,
        adapter=adapter,
        adam=config.adam,
        schedule=config.rate_schedule,
        dtype=dtype,
        layout="packed" if config.layout == "packed" else "padded",
        temperature=config.temperature,
        objective=Objective(config.objective, gather=ranks.gather),
        reference=reference,
        critic=_critic(config, ranks=ranks, device=device, dtype=dtype),
        ranks=ranks,
    )


def _place(model: nn.Module | None, config: TrainerConfig, *, ranks: Ranks) -> None:
    """Shard the weights of a model if the settings say so; they are equal on all ranks."""
    if model is None:
        return
    ranks.require_equal(model.parameters())
    if config.parallel == "fsdp2":
        if isinstance(model, PreTrainedModel):
            head_is_linear(model)
        shard(model, ranks.mesh())


def _reference(config: TrainerConfig, *, device: str) -> PreTrainedModel | None:
    """Return the policy that the KL is measured to, without gradients; None if nothing reads it."""
    if config.objective.kl is None:
        return None
    source = config.reference or _first_policy(config)
    is_adapter = isinstance(source, Path) and is_adapter_folder(source)
    if config.reference is None and config.adapter is not None and not is_adapter:
        return None
    return load_policy(source, device=device).requires_grad_(False)


def _critic(
    config: TrainerConfig, *, ranks: Ranks, device: str, dtype: torch.dtype
) -> Critic | None:
    """Return the critic with its first weights; a checkpoint replaces them later."""
    critic = config.critic_config
    if critic is None:
        return None
    source = critic.source or _first_policy(config)
    if isinstance(source, Path) and is_adapter_folder(source):
        from turnstream_server.models.adapters import base_folder

        source = base_folder(source)
    if critic.source is not None and not critic.source.is_dir():
        raise InvalidConfigError("--critic", f"{source} is no model folder")
    policy = load_policy(source, device=device)
    if config.layout == "packed":
        is_lower = dtype != torch.float32
        with torch.autocast(policy.device.type, dtype=dtype, enabled=is_lower):
            enable_packing(policy)
    if config.gradient_checkpointing:
        recompute_layers(policy)
    model = ValueModel(policy)
    _place(model, config, ranks=ranks)
    return Critic(
        model,
        settings=critic.gae,
        adam=config.adam,
        layout="packed" if config.layout == "packed" else "padded",
        dtype=dtype,
        ranks=ranks,
    )


def _load_all(source: PolicySource, *, device: str) -> PreTrainedModel:
    """Return the model, all of whose weights are trained."""
    if isinstance(source, Path) and is_adapter_folder(source):
        raise InvalidConfigError("lora_rank", f"0, but {source} holds an adapter")
    return load_policy(source, device=device)


def _make_adapter(
    config: TrainerConfig,
    checkpoint: Path | None,
    *,
    ranks: Ranks,
    device: str,
    dtype: torch.dtype,
) -> Adapter:
    """Return the adapter that is trained. Its frozen base model has the type of the products."""
    assert config.adapter is not None
    source = checkpoint or _first_policy(config)
    if isinstance(source, Path) and is_adapter_folder(source):
        adapter = load_adapter(source, device=device, dtype=dtype)
        adapter.require(config.adapter)
        return adapter
    if checkpoint is not None:
        message = f"{config.lora_rank}, but the checkpoint {checkpoint} holds a whole model"
        raise InvalidConfigError("lora_rank", message)
    from turnstream_server.models.adapters import Adapters

    base = _base_folder(source, config.folder, ranks=ranks)
    return Adapters(load_policy(base, device=device, dtype=dtype), base).add(
        ADAPTER, config.adapter
    )


def _base_folder(source: PolicySource, folder: Path, *, ranks: Ranks) -> Path:
    """Return the folder of the base model; the first rank writes a small model to one."""
    if isinstance(source, SmallModelSpec):
        if ranks.is_first:
            save_policy(load_policy(source), folder / "base")
        ranks.barrier()
        return folder / "base"
    return source


def _first_policy(config: TrainerConfig) -> PolicySource:
    if config.policy is not None:
        return read_policy_source(config.policy)
    assert config.small_model is not None
    return config.small_model


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
