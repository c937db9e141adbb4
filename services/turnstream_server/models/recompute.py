"""Gradient checkpointing: layers are computed again for the gradient, in place of being stored."""

from __future__ import annotations

import functools

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from turnstream.errors import InvalidConfigError


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep only the input of each layer for the gradient (arXiv:1604.06174).

    transformers does so in training mode alone, which would switch dropout on. This works in
    evaluation mode too.

    Raises:
        InvalidConfigError: the model has no such layers.
    """
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not layers:
        message = f"a {model.config.model_type} model has no layers to compute again"
        raise InvalidConfigError("gradient_checkpointing", message)
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
