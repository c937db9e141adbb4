"""Losses of operations and their gradients in float64, one datum at a time, for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from testkit.requests.datums import Inputs
from turnstream_server.models.policy import load_adapter


class Reference(NamedTuple):
    """The summed loss, log-probabilities of the targets, and the adapter's gradients."""

    loss: float
    logprobs: list[NDArray[np.float64]]
    gradients: dict[str, Tensor]


def reference(
    folder: Path, data: Sequence[Inputs], *, loss: str, settings: Mapping[str, float]
) -> Reference:
    """Return loss and gradients for the adapter of a folder."""
    adapter = load_adapter(folder)
    model: Any = adapter.model.double()
    weights = dict(adapter.named_parameters())
    total = torch.zeros((), dtype=torch.float64)
    logprobs: list[Tensor] = []
    for inputs in data:
        logits = model(torch.tensor(inputs["model_input"])[None].long()).logits[0]
        targets = torch.tensor(inputs["target_tokens"]).reshape(len(logits), -1)
        own = torch.log_softmax(logits, dim=-1).gather(1, targets)
        own = own.reshape(inputs["target_tokens"].shape)
        total = total + datum_loss(own, inputs, loss=loss, settings=settings)
        logprobs.append(own)
    total.backward()
    gradients = {
        _stored_name(name): weight.grad.clone() if weight.grad is not None else weight * 0
        for name, weight in weights.items()
    }
    return Reference(total.item(), [each.detach().numpy() for each in logprobs], gradients)


def stored_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of an adapter in a folder."""
    return load_file(folder / "adapter_model.safetensors")


def datum_loss(p: Tensor, inputs: Inputs, *, loss: str, settings: Mapping[str, float]) -> Tensor:
    """Return the loss of a datum, summed over its positions, as the SDK defines its losses.

    `p` (the log-probabilities of the targets) has the shape of `target_tokens`, float64.
    """
    weights = torch.tensor(inputs.get("weights", np.ones(p.shape, np.float32))).double()
    if loss == "cross_entropy":
        return -(weights * p).sum()
    advantage = torch.tensor(inputs["advantages"]).double()
    q = torch.tensor(inputs["logprobs"]).double()
    low = settings.get("clip_low_threshold", 0.8)
    high = settings.get("clip_high_threshold", 1.2)
    ratio = torch.exp(p - q)
    if loss == "importance_sampling":
        return -(weights * ratio * advantage).sum()
    if loss == "ppo":
        clipped = ratio.clamp(low, high)
        return -(weights * torch.minimum(ratio * advantage, clipped * advantage)).sum()
    if loss == "cispo":
        return -(weights * ratio.detach().clamp(low, high) * p * advantage).sum()
    if loss == "dro":
        beta = settings.get("beta", 0.05)
        return -(weights * (p * advantage - 0.5 * beta * (p - q) ** 2)).sum()
    assert loss == "gspo"
    mask = torch.tensor(inputs["sequence_ratio_mask"]).double()
    mean = ((p.detach() - q) * mask).sum() / mask.sum().clamp(min=1)
    ratio = torch.exp(mean) * torch.exp(p - p.detach())
    clipped = ratio.clamp(low, high)
    return -(weights * torch.minimum(ratio * advantage, clipped * advantage)).sum()


def _stored_name(name: str) -> str:
    return "base_model.model." + name.replace(".default.", ".")
