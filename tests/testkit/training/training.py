"""A small model, mini-batches as a trainer pulls them, and an engine for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import testkit
from turnstream.types import Rows
from turnstream.worker import PulledMiniBatch
from turnstream_server.models.packed import enable_packing
from turnstream_server.models.policy import load_policy
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.trainer.critic.config import CriticConfig, GaeSettings
from turnstream_server.trainer.critic.critic import Critic, ValueModel
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.settings import AdamSettings

torch.set_num_threads(1)  # tiny tensors: a second thread would only wait for the first


def make_model(*, seed: int = 0) -> PreTrainedModel:
    """One layer over the letters."""
    spec = SmallModelSpec(
        vocab_size=128, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, seed=seed
    )
    return load_policy(spec)


def make_engine(
    model: PreTrainedModel | None = None,
    *,
    learning_rate: float = 1e-2,
    max_grad_norm: float = 1.0,
    **options: Any,
) -> Engine:
    """An engine for a model; None for a new one."""
    adam = AdamSettings(learning_rate=learning_rate, max_grad_norm=max_grad_norm)
    return Engine(make_model() if model is None else model, adam=adam, **options)


def make_value_model(policy: PreTrainedModel | None = None, *, head_std: float = 0.3) -> ValueModel:
    """A value model that takes packed rows too; its values differ, unless `head_std` is 0."""
    policy = make_model(seed=5) if policy is None else policy
    enable_packing(policy)
    model = ValueModel(policy)
    with torch.no_grad():
        noise = torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(7))
        model.head.weight += head_std * noise.to(model.head.weight.dtype)
    return model


def make_critic(model: ValueModel | None = None, *, text: str = "", **options: Any) -> Critic:
    """A critic of a value model; `text` are its parameters as a user types them."""
    settings = CriticConfig.parse(f"policy:{text}").gae if text else GaeSettings(learning_rate=1e-2)
    return Critic(
        make_value_model() if model is None else model,
        settings=settings,
        adam=AdamSettings(learning_rate=0.0, max_grad_norm=0),
        **options,
    )


def row_values(model: ValueModel, rows: Rows) -> list[Tensor]:
    """Return the value before each response token of every row, each row alone."""
    found: list[Tensor] = []
    for ids, prompt in zip(rows.input_ids, rows.prompt_length.tolist(), strict=True):
        hidden_TH = model.backbone(input_ids=torch.from_numpy(ids.astype(np.int64))[None])
        values_T = model.head(hidden_TH.last_hidden_state[0])[:, 0]
        found.append(values_T[prompt - 1 : -1])
    return found


def pulled(built: Rows, **info: Any) -> PulledMiniBatch:
    """These rows as they come out of a BatchStream; `info` replaces fields."""
    return PulledMiniBatch(
        rows=built,
        info=testkit.mini_batch_info(built, **info),
        content_hash="0" * 64,
        num_bytes=0,
    )


def make_mini_batch(
    *,
    advantages: Sequence[float] = (1.0, -0.5, 0.25, -1.5),
    logprobs: float | None = -4.5,
    **info: Any,
) -> PulledMiniBatch:
    """Rows in two groups, with advantages."""
    built = testkit.rows(
        *("abCDefG", "xY", "hijKLM", "pqRsT"),
        group_ids=["g0", "g0", "g1", "g1"],
        advantages=advantages,
        logprobs=logprobs,
    )
    return pulled(built, **info)
