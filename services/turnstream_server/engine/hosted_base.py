"""A base model in the memory of this rank, and the engines of the models that are made of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from transformers import PreTrainedModel

from turnstream.errors import BatchingError
from turnstream_server.models.policy import load_policy, recompute_layers
from turnstream_server.models.spec import AdapterConfig
from turnstream_server.operations.models import ModelRecord
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.ranks import ONE_RANK, Ranks
from turnstream_server.trainer.settings import AdamSettings, Layout

if TYPE_CHECKING:
    from turnstream_server.models.adapters import Adapter

OPTIMIZER: Final = "optimizer.pt"
"""File of the moments in a folder of weights."""

_ALPHA: Final = 32.0
"""Adapters have no alpha in the protocol; this is the usual one."""

_UNUSED: Final = AdamSettings(learning_rate=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of all engines of a worker.

    Attributes:
        layout, dtype: as for `Engine`.
        device: torch device of this rank.
        max_rank: largest rank of an adapter.
        full: all weights of a model are trained, each model with its own; else adapters.
        gradient_checkpointing: layers are computed again for the gradient.
    """

    layout: Layout = "padded"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    max_rank: int = 256
    full: bool = False
    gradient_checkpointing: bool = False


class LoadedModel(NamedTuple):
    """The weights of a model, and the engine that trains them.

    Attributes:
        adapter: adapter of the shared base model; None if the model has weights of its own.
    """

    engine: Engine
    adapter: Adapter | None


class HostedBase:
    """A base model of this worker, the same on all ranks, which make the same calls.

    Raises:
        InvalidConfigError: the folder holds no model, or ranks have different ones.
    """

    def __init__(
        self, name: str, folder: Path, *, settings: EngineSettings, ranks: Ranks = ONE_RANK
    ) -> None:
        from turnstream_server.models.adapters import Adapters

        self.name = name
        self._folder = folder
        self._settings = settings
        self._ranks = ranks
        self._numbers = itertools.count()
        base = self._load_policy(folder, dtype=settings.dtype)
        ranks.require_equal(base.parameters())
        config: Any = base.config.get_text_config()
        self.context_length: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self._adapters = None if settings.full else Adapters(base, folder)

    @property
    def max_rank(self) -> int:
        """Largest rank of an adapter; 0 if only whole models are trained."""
        return 0 if self._adapters is None else self._settings.max_rank

    def make(self, record: ModelRecord) -> LoadedModel:
        """Return a new model; BatchingError if the base model has no models of this kind."""
        self._check(record)
        if self._adapters is None:
            policy = self._load_policy(self._folder, dtype=torch.float32)
            return LoadedModel(self._engine(policy, None), None)
        adapter = self._adapters.add(self._new_name(), _config(record))
        return LoadedModel(self._engine(adapter.model, adapter), adapter)

    def load(
        self,
        record: ModelRecord,
        folder: Path,
        *,
        optimizer: bool,
        into: LoadedModel | None = None,
    ) -> LoadedModel:
        """Return a model with the weights of a folder, without gradients.

        Without `optimizer` its moments begin at zero. `into` is this model until now, which must
        not be used any more, except after an error.

        Raises:
            BatchingError: the weights are those of another kind of model.
        """
        self._check(record)
        if self._adapters is None:
            return self._load_whole(folder, optimizer=optimizer, into=into)
        adapter = self._adapters.load(self._new_name(), folder)
        try:
            adapter.require(_config(record))
            engine = self._engine(adapter.model, adapter)
            if optimizer:
                self._load_optimizer(engine, folder)
        except BaseException:
            self._adapters.remove(adapter.name)
            raise
        if into is not None:
            self.release(into)
        return LoadedModel(engine, adapter)

    def release(self, model: LoadedModel) -> None:
        """Free the weights of a model, which must not be used any more."""
        if self._adapters is not None and model.adapter is not None:
            self._adapters.remove(model.adapter.name)

    def _check(self, record: ModelRecord) -> None:
        limit = self.max_rank
        if record.is_lora != (limit > 0) or record.lora_rank > limit:
            expected = f"1 to {limit}" if limit else "0: all weights are trained"
            message = f"{record.lora_rank}, expected {expected}"
            raise BatchingError(f"lora_rank of a model of {self.name!r} is {message}")

    def _load_whole(
        self, folder: Path, *, optimizer: bool, into: LoadedModel | None
    ) -> LoadedModel:
        # Not to the device: it may lack the memory for two.
        stored = load_policy(folder)
        policy = self._load_policy(self._folder) if into is None else into.engine.model
        engine = self._engine(policy, None)
        if optimizer:
            self._load_optimizer(engine, folder)
        policy.load_state_dict(stored.state_dict())
        return LoadedModel(engine, None)

    def _load_policy(self, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        policy = load_policy(folder, device=self._settings.device, dtype=dtype)
        if self._settings.gradient_checkpointing:
            recompute_layers(policy)
        return policy

    def _engine(self, policy: PreTrainedModel, adapter: Adapter | None) -> Engine:
        if adapter is not None:
            # A trial of the layout must not run with the weights of another model.
            adapter.activate()
        settings = self._settings
        return Engine(
            policy,
            adapter=adapter,
            adam=_UNUSED,
            layout=settings.layout,
            dtype=settings.dtype,
            ranks=self._ranks,
        )

    def _load_optimizer(self, engine: Engine, folder: Path) -> None:
        device = engine.model.device
        state = torch.load(folder / OPTIMIZER, map_location=device, weights_only=True)
        # Another worker may have the base model in another folder.
        engine.load_state_dict({name: state[name] for name in state if name != "base"})

    def _new_name(self) -> str:
        return f"model-{next(self._numbers)}"


def write(model: LoadedModel, folder: Path, *, optimizer: bool) -> None:
    """Write the weights of a model into an existing folder, and its moments if asked."""
    model.engine.gather_weights()(folder)
    if optimizer:
        torch.save(model.engine.state_dict(), folder / OPTIMIZER)


def _config(record: ModelRecord) -> AdapterConfig:
    return AdapterConfig(
        rank=record.lora_rank,
        alpha=_ALPHA,
        seed=record.lora_seed,
        train_attention=record.train_attn,
        train_mlp=record.train_mlp,
        train_unembedding=record.train_unembed,
    )
